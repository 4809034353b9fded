"""``quantize``: a Linen model as it is, with quantized layers.

A quantized model has a class of its own, derived from the model's.  While one of its
methods runs, an interceptor of Flax gives each layer that runs inside its op.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import in_filter, union_filters
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.traverse_util import flatten_dict
from jax import lax

from fbq_jax.core.layer_stats import is_state
from fbq_jax.core.threshold import layer_path
from fbq_jax.flax_internals import MethodWrapper, module_fingerprint, split_axes
from fbq_jax.kernels.rounding import fold
from fbq_jax.linen.conv import FallbackConv
from fbq_jax.linen.einsum import FallbackEinsum, call_einsum
from fbq_jax.linen.rules import Root, RulesDot, quantized_root
from fbq_jax.linen.state import (
    calling_module,
    codes_collection,
    is_mutable_state,
    share_state,
    sharing_states,
)
from fbq_jax.model_kind import (
    DerivedClasses,
    check_linen,
    check_unchanged_by_qwix,
)
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import RulesReport, warn_of_idle_rules
from fbq_jax.recipes.schema import Recipe

M = TypeVar("M", bound=nn.Module)


def quantize(
    model: M,
    rules: Mapping[str, Recipe | None] | RulesDot,
    rngs: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[M, RulesReport]:
    """Quantizes the layers of a Linen model, whose code does not change.

    All modules inside the model, Flax's or others, that have a field ``dot_general``,
    ``conv_general_dilated`` or ``einsum_op`` compute as if the model's code had passed
    them a ``RulesDot(rules)`` (in a ``FallbackConv`` or a ``FallbackEinsum``), with the
    same state, the same parameters and the same bits; so do ``nn.Einsum`` layers.  A
    layer whose field has another op keeps it.  Rules that name products of two
    activations (``fbq_jax.recipes.path_rules``) apply to Flax's attention.

    The returned model is an instance of the model's class, with the same fields and
    methods, and may be a part of other models.  Rules match paths inside the quantized
    model, wherever it is.  ``nn.scan`` and ``nn.vmap`` inside it carry the state on
    axis 0, with a seed of its own in each step if the call that makes it has a key for
    ``"params"``.  Where ``nn.vmap`` shares the
    parameters, the axis is the last one, and evaluation takes any number of examples,
    with the mean of their thresholds.  All steps of an ``nn.RNN`` share one state,
    which ``init`` creates.  A layer that is taken out of the model, as in
    ``model.bind(variables).head(x)``, computes in float.

    Layers that multiply by their parameters in their own code, by ``jnp.einsum`` or
    ``@``, stay in float, which the report says:
    ``fbq_jax.contrib.qwix.quantize`` reaches them.

    Args:
      model: an unbound model, which does not change.
      rules: a mapping from patterns of layer paths to recipes, tried in order
        (``fbq_jax.recipes.path_rules``); or a ``RulesDot``, with another collection or
        implementation, or ``ignore_precision``.
      rngs: PRNG keys for ``model.init``, which is traced for the report.
      *args: the arguments of the model; arrays may be ``jax.ShapeDtypeStruct``.
      **kwargs: keyword arguments of the model, such as ``train=False``, and ``method``.

    Returns:
      The quantized model, and what became of each parameter.  Nothing is computed.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None, or the model is not
        one of Linen.
      ValueError: a pattern is not a regular expression, or the model is bound.

    >>> import jax
    >>> from fbq_jax import recipes
    >>> class Classifier(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(8, name="head")(nn.relu(nn.Dense(32, name="up")(x)))
    >>> x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    >>> rules = {"head": None, ".*": recipes.fallback}
    >>> model, report = quantize(Classifier(), rules, jax.random.key(0), x)
    >>> print(report)
    parameter    shape    rule  recipe
    up/kernel    16 x 32  .*    fallback
    head/kernel  32 x 8         float: rule 'head'
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> sorted(variables["fallback"])
    ['up']
    """
    return quantize_with(run_with_ops, model, rules, rngs, args, kwargs)


def quantize_with(
    run: Callable[[RulesDot, Callable[[], Any]], Any],
    model: M,
    rules: Mapping[str, Recipe | None] | Pairs | RulesDot,
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[M, RulesReport]:
    """``quantize``, where ``run`` calls a function whose layers get the op."""
    check_linen("quantize", model)
    if model.scope is not None:
        raise ValueError(
            f"quantize takes an unbound model; this {type(model).__name__} is bound to "
            "variables: quantize it first, then pass them to its apply"
        )
    dot = rules if isinstance(rules, RulesDot) else RulesDot(rules)
    quantized = _new(type(model), Root(dot, run))
    vars(quantized).update(vars(model.clone()))
    report = dot.report(quantized, rngs, *args, **kwargs)
    warn_of_idle_rules(path_rules.as_pairs(dot.rules), report, stacklevel=3)
    return quantized, report


class _Quantized(MethodWrapper):
    """The base of the classes of quantized models, before the model's own class."""

    unquantized: type[nn.Module]
    quantization: Root

    def around_method(self, call: Callable[[], Any]) -> Any:
        out = _run(self, call)
        _separate_steps(self)
        return out

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        apply = super().apply  # type: ignore[misc]
        # Also where method= is a function of the model.
        return _run(self, lambda: apply(*args, **kwargs))

    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        init = super().init_with_output  # type: ignore[misc]
        return _run(self, lambda: init(*args, **kwargs))

    def __reduce__(self) -> Any:
        arguments = self.unquantized, self.quantization
        return _new, arguments, self.__dict__


def _define(cls: Any, quantization: Root) -> dict[str, Any]:
    """What the class of a quantized model defines.

    Flax makes new methods for a class that has none of its own, and a model's may do
    more.
    """
    methods = {name: getattr(cls, name) for name in ("__init__", "__eq__", "__hash__")}
    return {**methods, "quantization": quantization}


_quantized_class = DerivedClasses(_define, _Quantized)


def _new(cls: Any, quantization: Root) -> Any:
    """An empty quantized model, for ``pickle`` and ``copy``."""
    return object.__new__(_quantized_class(cls, quantization))


def _run(model: Any, call: Callable[[], Any]) -> Any:
    """Calls a function of a quantized model, whose layers get their op."""
    dot, run, _ = model.quantization
    if run is run_with_ops:
        check_unchanged_by_qwix(model, "fbq_jax.contrib.qwix.quantize")
    path = () if model.scope is None else model.path
    root = Root(dot, run, path)
    if quantized_root.value == root:
        return call()
    with (
        split_axes.replaced(_carry_state),
        module_fingerprint.replaced(_add_path),
        quantized_root(root),
        sharing_states(),
    ):
        return run(dot, call)


def _separate_steps(model: Any) -> None:
    """Gives each step of an ``nn.scan`` a seed, where all start with the same one.

    That is so where the steps share their parameters, and Flax lets their keys not be
    split.  A layer inside cannot know the index of its step.
    """
    if model.scope is None or not model.is_initializing():
        return
    collection = model.quantization.dot.collection
    states = flatten_dict(
        model.scope.variables().get(collection, {}), is_leaf=lambda _, x: is_state(x)
    )
    for (*parents, name), state in states.items():
        if is_state(state):
            scope = model.scope.rewound()  # the model's own scope reserves no names
            for parent in parents:
                scope = scope.push(parent, reuse=True)
            state = {**state, "seed": _unequal(state["seed"])}
            scope.put_variable(collection, name, state)


def _unequal(seeds: jax.Array) -> jax.Array:
    """Other seeds along each axis of a stack that has only one; they have 24 bits."""
    for axis, size in enumerate(seeds.shape):
        if size > 1:
            index = lax.broadcasted_iota(jnp.uint32, seeds.shape, axis)
            others = fold(seeds.astype(jnp.uint32), index) >> 8
            is_same = jnp.all(seeds == seeds.take(jnp.array([0]), axis))
            seeds = jnp.where(is_same, others.astype(seeds.dtype), seeds)
    return seeds


def run_with_ops(dot: RulesDot, call: Callable[[], Any]) -> Any:
    """Calls a function in ``inject_ops``."""
    with inject_ops(dot):
        return call()


def inject_ops(dot: RulesDot) -> AbstractContextManager[None]:
    """A context in which layers that have a field for an op get the op."""
    ops: dict[str, tuple[Any, Any]] = {
        "dot_general": (lax.dot_general, dot),
        "conv_general_dilated": (lax.conv_general_dilated, FallbackConv(dot)),
        "einsum_op": (jnp.einsum, FallbackEinsum(dot)),
    }

    def einsum_of_activations(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
        of_product = dot.of_activations(operands[-1].shape)
        einsum = jnp.einsum if of_product is None else FallbackEinsum(of_product)
        return einsum(subscripts, *operands, **kwargs)

    attention_ops = dict.fromkeys(
        ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"),
        (None, lambda: einsum_of_activations),
    )

    def give_op(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module: Any = context.module
        root = quantized_root.value
        if root is None or root.dot != dot:
            return call(*args, **kwargs)  # the layer is in another quantized model
        if type(module).__call__ is nn.Einsum.__call__ and (
            context.method_name == "__call__"
        ):
            return call_einsum(module, ops["einsum_op"][1], *args, **kwargs)
        taken = ops
        # Qwix reaches the products of activations in any code.
        if isinstance(module, nn.MultiHeadDotProductAttention) and (
            root.run is run_with_ops and _takes_einsums(module, dot)
        ):
            taken = ops | attention_ops
        given = {}
        for field in dataclasses.fields(module):
            value = getattr(module, field.name, None)
            if field.name not in taken:
                continue
            if value is not None and value is not taken[field.name][0]:
                continue
            if getattr(module, f"{field.name}_cls", None) is None:
                given[field.name] = taken[field.name][1]
        if isinstance(module, nn.RNN):
            given |= _share_state(module, dot.collection)
        values = {name: getattr(module, name) for name in given}
        try:
            for name, value in given.items():
                object.__setattr__(module, name, value)
            return call(*args, **kwargs)
        finally:
            for name, value in values.items():
                object.__setattr__(module, name, value)

    context: AbstractContextManager[None] = nn.intercept_methods(give_op)
    return context


def _takes_einsums(attention: nn.MultiHeadDotProductAttention, dot: RulesDot) -> bool:
    """Whether attention can have einsums of its own, which exclude a precision.

    Raises:
      ValueError: it cannot, and rules name its products.
    """
    if attention.precision is None:
        return True
    if attention.scope is not None and dot.names_activations(attention):
        raise ValueError(
            f"layer {layer_path(attention.path)!r}: Flax's attention takes no "
            f"quantized products with precision={attention.precision}. Omit the "
            "precision, or the rules with '@'"
        )
    return False


def _share_state(rnn: nn.RNN, collection: str) -> dict[str, Any]:
    """The fields of an ``nn.RNN`` with which all steps of time share one state.

    In training the state moves from step to step.  Flax's scan creates, and keeps, only
    variables that do not.
    """
    named = (*rnn.variable_axes, rnn.variable_broadcast, rnn.variable_carry)
    if rnn.scope is None or collection == OVERWRITE_WITH_GRADIENT:
        return {}  # a gradient that steps share would be summed
    if any(in_filter(collections, collection) for collections in named):
        return {}
    moves = is_mutable_state(rnn.scope, collection) and not rnn.is_initializing()
    codes = codes_collection(collection)
    fields = {"variable_broadcast": union_filters(rnn.variable_broadcast, codes)}
    field = "variable_carry" if moves else "variable_broadcast"
    before = fields.get(field, getattr(rnn, field))
    return fields | {field: union_filters(before, collection)}


def _carry_state(split_axes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes ``nn.scan`` and ``nn.vmap`` in a quantized model carry state and codes.

    Both read the axes of variable collections by this function when they run.  Models
    name the collections that they have themselves, and a missing one would be lost.
    """

    @functools.wraps(split_axes)
    def split_axes_with_state(variable_axes: Mapping[Any, Any]) -> Any:
        if (root := quantized_root.value) is not None:
            collection = root.dot.collection
            variable_axes = _with_codes(variable_axes, codes_collection(collection))
            if not any(in_filter(axis, collection) for axis in variable_axes):
                axis = _state_axis(variable_axes, collection)
                variable_axes = {**variable_axes, collection: axis}
        return split_axes(variable_axes)

    return split_axes_with_state


def _state_axis(variable_axes: Mapping[Any, Any], collection: str) -> int | None:
    """The axis of the steps of an ``nn.scan`` or ``nn.vmap`` in the state.

    Examples that share their parameters have a state each in training.  In evaluation
    they share it (``state_of``), so there may be more or fewer of them.  Their axis is
    the last one, because an ``nn.scan`` inside takes the first one.
    """
    if not _shares_params(variable_axes) or collection == OVERWRITE_WITH_GRADIENT:
        return 0
    module = calling_module()
    if module is None or is_mutable_state(module.scope, collection):
        return -1
    share_state(module)
    return None


def _with_codes(variable_axes: Mapping[Any, Any], codes: str) -> Mapping[Any, Any]:
    """Carries the codes of a step's weights on axis 0, or shares them as the weights.

    Where ``nn.scan`` broadcasts the parameters, the axes do not have them.
    """
    names = list(variable_axes)
    if any(in_filter(x, codes) for x in names) or not any(
        in_filter(x, "params") for x in names
    ):
        return variable_axes
    return {**variable_axes, codes: None if _shares_params(variable_axes) else 0}


def _shares_params(variable_axes: Mapping[Any, Any]) -> bool:
    """Whether the examples of an ``nn.vmap`` share their parameters."""
    return any(
        in_filter(names, "params") and getattr(axis, "axis", axis) is None
        for names, axis in variable_axes.items()
    )


def _add_path(fingerprint: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Makes ``nn.jit`` trace each layer of a quantized model.

    It takes modules with equal fingerprints for the same one, wherever they are, and
    would give the second the first one's rule.
    """

    @functools.wraps(fingerprint)
    def fingerprint_with_path(module: nn.Module) -> Any:
        found = fingerprint(module)
        return found if quantized_root.value is None else (found, module.path)

    return fingerprint_with_path
