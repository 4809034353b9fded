"""Rules for Flax NNX models: the path of each layer decides its recipe."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.tracing import UnknownDependentsError
from fbq_jax.model_kind import check_nnx, check_unchanged_by_qwix
from fbq_jax.nnx.dot import (
    LAYER_OPS,
    FallbackDot,
    FallbackOp,
    Layer,
    LayerOp,
    dot_of,
    layer_op,
)
from fbq_jax.nnx.grouped_dense import GroupedDense
from fbq_jax.nnx.int8_flow import Block
from fbq_jax.nnx.naming import modules_of, name_layers
from fbq_jax.nnx.tracing import (
    matrices,
    matrices_of,
    parameter_paths,
    read_parameters,
    trace_products,
)
from fbq_jax.recipes import fallback, path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    FloatProduct,
    QuantizedParameter,
    RulesReport,
    rules_report,
    warn_of_idle_rules,
)
from fbq_jax.recipes.schema import Recipe


class MatchedLayer(NamedTuple):
    """A layer that takes an op, and the rule that matches it; None if none does."""

    path: str
    module: nnx.Module
    op: LayerOp
    pattern: str | None
    recipe: Recipe | None


def quantize(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *args: Any,
    quantize_rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
    ignore_precision: bool = False,
    **kwargs: Any,
) -> RulesReport:
    """Gives each layer of a model the recipe of the first rule that matches its path.

    Layers are ``nnx.Linear``, ``nnx.LinearGeneral``, ``nnx.Einsum``, ``nnx.Conv``, the
    ``gate_up`` and ``down`` of ``fbq_jax.nnx.MoEMLP``, and all other modules with an
    attribute ``dot_general``, ``einsum_op`` or ``conv_general_dilated`` that is None or
    the unquantized op.  A layer gets its own ``FallbackDot`` as its ``dot_general``,
    ``FallbackEinsum`` as its ``einsum_op`` or ``FallbackConv`` as its
    ``conv_general_dilated``.  If its rule is None, it gets the unquantized op:
    ``lax.dot_general``, ``jnp.einsum`` or ``lax.conv_general_dilated``.  A layer that
    no rule matches keeps its op.  A stack of layers, made by ``nnx.vmap`` for
    ``nnx.scan``, has one rule, and each of its layers a state of its own, on the first
    axis.  Warnings name every quantized layer by its path
    (``fbq_jax.nnx.name_layers``).

    Layers that multiply by their parameters in their own code, by ``jnp.einsum`` or
    ``@``, stay in float, which the report says:
    ``fbq_jax.contrib.qwix.quantize_nnx`` reaches them.

    Args:
      model: changed in place; an error leaves it unchanged.
      rules: a mapping from patterns of paths, such as ``"blocks/0/mlp/up"``, to
        recipes, tried in order (``fbq_jax.recipes.path_rules``).
      *args: the arguments of a call of the model; arrays may be
        ``jax.ShapeDtypeStruct``.  The call is traced, and the report says what it does
        with each parameter.  A layer whose weight it reads without the layer's op gets
        the unquantized op.  Without any arguments nothing is traced, and the report
        goes by the kinds of the layers.
      quantize_rngs: seeds the noise of the layers, as the ``rngs`` of ``FallbackDot``.
      implementation: the implementation of the layers' ops, as in ``FallbackDot``.
      ignore_precision: whether to quantize products that ask for a precision, such as
        HIGHEST; otherwise they are errors.
      **kwargs: keyword arguments of the same call, and so its ``rngs``.

    Returns:
      The rule of each layer, the rules that apply to no layer, the layers without a
      rule, and what became of each parameter.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None, or the model is not
        one of NNX.
      ValueError: a pattern is not a regular expression, or no implementation has this
        name; Qwix changed the model; a layer is frozen; a matched layer is a stack of
        layers whose axis is not the first; or a rule is for products of two
        activations, which ``fbq_jax.contrib.qwix.quantize_nnx`` reaches.

    >>> model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    >>> from fbq_jax import recipes
    >>> rules = {"out": None, "query|key": recipes.fallback, "up": recipes.block}
    >>> report = quantize(model, rules)
    >>> report.layers
    {'key': 'query|key', 'out': 'out', 'query': 'query|key'}
    >>> report.unused_rules, report.unmatched_layers
    (('up',), ('value',))
    """
    pairs = path_rules.as_pairs(rules)
    remedy = "fbq_jax.contrib.qwix.quantize_nnx"
    check_unchanged_by_qwix(model, remedy)
    path_rules.refuse_activations_rules(pairs, f"use {remedy}")
    quantize_rngs = take_rngs(model, args, kwargs, quantize_rngs)
    with unchanged_on_error(model):
        layers = quantize_layers(
            model,
            pairs,
            rngs=quantize_rngs,
            implementation=implementation,
            ignore_precision=ignore_precision,
        )
        name_layers(model)
        floats: list[FloatProduct] = []
        if args or kwargs:
            try:
                traced = _recording_floats(model, layers, floats)
                products = trace_products(traced, args, kwargs)
            except (TypeError, ValueError) as error:
                if args and _is_random_state(args[0]):
                    raise TypeError(
                        "fbq_jax.nnx.quantize takes no key, and its seeds by keyword: "
                        "quantize(model, rules, x, quantize_rngs=nnx.Rngs(0)); the "
                        "arguments of the model's call begin with "
                        f"{type(args[0]).__name__} here"
                    ) from error
                raise
            drop_unused_ops(model, layers, products, args, kwargs)
        else:
            products = _expected_products(model, layers)
    found = {layer.path: layer.pattern for layer in layers}
    return report_on(model, pairs, found, products, (), floats)


def report_on(
    model: nnx.Module,
    rules: Pairs,
    found: Mapping[str, str | None],
    products: Iterable[QuantizedParameter],
    activation_products: Iterable[ActivationProduct],
    float_products: Iterable[FloatProduct],
) -> RulesReport:
    """Makes the report of a model, and warns the caller's caller of idle rules.

    Other arguments than the model are as in ``rules_report``.
    """
    modules = modules_of(model).items()
    # Their own operators quantize their parameters.
    blocks = tuple(f"{p}/".lstrip("/") for p, m in modules if isinstance(m, Block))
    matrices = {
        path: shape
        for path, shape in matrices_of(model).items()
        if not path.startswith(blocks)
    }
    # A layer may have the parameter of another module, as a tied head does.
    names = parameter_paths(model)
    shared = [
        FloatProduct(path, names[id(value)])
        for path, module in modules
        if path in found
        for value in vars(module).values()
        if isinstance(value, nnx.Param)
    ]
    report = rules_report(
        rules,
        found,
        matrices,
        products,
        activation_products,
        [*shared, *float_products],
    )
    warn_of_idle_rules(rules, report, stacklevel=3)
    return report


def _recording_floats(
    model: nnx.Module, layers: Iterable[MatchedLayer], floats: list[FloatProduct]
) -> nnx.Module:
    """A copy of a model that records the products which rules leave in float.

    They have no ops.  Flax's layers multiply by parameters of their own.
    """

    def record(path: str, op: LayerOp, *args: Any, **kwargs: Any) -> jax.Array:
        arrays = [x for x in (*args, kwargs.get("rhs")) if hasattr(x, "shape")]
        floats.append(FloatProduct(path, arrays[-1].shape))
        return op.unquantized(*args, **kwargs)

    model = nnx.clone(model)
    modules = modules_of(model)
    for path, module, op, pattern, recipe in layers:
        if recipe is None and pattern is not None and not isinstance(module, Layer):
            value = nnx.static(functools.partial(record, path, op))
            setattr(modules[path], op.name, value)
    return model


def take_rngs(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    quantize_rngs: nnx.Rngs | None,
) -> nnx.Rngs | None:
    """The ``quantize_rngs`` of a call of ``quantize``, which once was ``rngs``.

    The model's own call may take ``rngs``, and then gets them.  Otherwise ``kwargs``,
    which are for that call, lose them.
    """
    if quantize_rngs is not None or "rngs" not in kwargs:
        return quantize_rngs
    is_called = args or len(kwargs) > 1
    if is_called and "rngs" in inspect.signature(type(model).__call__).parameters:
        return None
    warnings.warn(
        "rngs= of quantize is quantize_rngs= now, and seeds the noise of the layers: "
        "rngs= is for models whose call takes it",
        DeprecationWarning,
        stacklevel=3,
    )
    rngs: nnx.Rngs | None = kwargs.pop("rngs")
    return rngs


@contextlib.contextmanager
def unchanged_on_error(model: nnx.Module) -> Iterator[None]:
    """After an error, gives each module of a model its fields back."""
    before = [(module, dict(vars(module))) for _, module in nnx.iter_modules(model)]
    try:
        yield
    except BaseException:
        for module, fields in before:
            vars(module).clear()
            vars(module).update(fields)
        raise


def quantize_layers(
    model: nnx.Module, rules: Pairs, **options: Any
) -> list[MatchedLayer]:
    """Gives each layer that takes an op its own, with the options of ``FallbackDot``.

    Returns:
      These layers, and those that no rule matches.
    """
    check_nnx("quantize", model)
    DotConfig(fallback, options["implementation"])  # checks it
    layers = []
    for path, module in modules_of(model).items():
        if isinstance(module, FallbackDot) and module.weight is not None:
            raise ValueError(
                f"layer {module.layer!r} is frozen, and another op would lose its "
                "codes: quantize takes the model from before it was frozen"
            )
        if (op := _op_of(module)) is None:
            continue
        layer = MatchedLayer(path, module, op, *path_rules.first_match(rules, path))
        if layer.recipe is not None:
            _stack_shape(layer)  # raises an error before anything changes
        layers.append(layer)
    for layer in layers:
        if layer.pattern is not None:
            _set_op(layer, layer.recipe, **options)
    return layers


def drop_unused_ops(
    model: nnx.Module,
    layers: Iterable[MatchedLayer],
    products: Iterable[QuantizedParameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Takes the ops back from layers whose weight a call reads without them.

    Such an op would look like a layer that never trains.  A layer that did not run
    keeps its op.  ``products`` are the quantized ones of the call.
    """
    reached, names = {product.layer for product in products}, parameter_paths(model)
    weights = {
        names[id(weight)]: layer
        for layer in layers
        if layer.recipe is not None and layer.path not in reached
        for weight in _weights_of(layer.module)
    }
    try:
        read = read_parameters(model, weights, args, kwargs)
    except UnknownDependentsError:
        return  # the report says which layers no op reached
    for name in read:
        _set_op(weights[name], None)


def _expected_products(
    model: nnx.Module, layers: Iterable[MatchedLayer]
) -> list[QuantizedParameter]:
    """The quantized products of layers, by the kinds of the layers."""
    names = parameter_paths(model)
    return [
        QuantizedParameter(
            names[id(weight)], weight.shape, layer.path, None, layer.recipe
        )
        for layer in layers
        if layer.recipe is not None and len(_weights_of(layer.module)) == 1
        for weight in _weights_of(layer.module)
    ]


def _weights_of(module: nnx.Module) -> list[nnx.Param[Any]]:
    """The parameters that a module may multiply by."""
    if isinstance(module, Layer):
        return [module.kernel]
    return [value for _, value in matrices(module)]


def _is_random_state(x: Any) -> bool:
    if isinstance(x, nnx.Rngs):
        return True
    return jnp.issubdtype(getattr(x, "dtype", None) or bool, jax.dtypes.prng_key)


def _op_of(module: nnx.Module) -> LayerOp | None:
    """The op of a module that takes one."""
    if isinstance(module, Layer):
        return layer_op(module)
    if isinstance(module, FallbackDot | FallbackOp):
        return None  # an op itself
    if isinstance(module, Block):
        return None  # its op holds the state of its own operators
    for op in LAYER_OPS.values():
        value = getattr(module, op.name, module)
        # A module's own ``==`` may be anything.
        if value is None or value is op.unquantized or isinstance(value, op.quantized):
            return op
    return None


def _set_op(layer: MatchedLayer, recipe: Recipe | None, **options: Any) -> None:
    """Gives a layer the op of a recipe, or the unquantized one for None."""
    module, op = layer.module, layer.op
    if recipe is None:
        value = nnx.static(op.unquantized)
    else:
        quantized = op.quantized(recipe, **options)
        if shape := _stack_shape(layer):
            dot = dot_of(quantized)
            assert dot is not None
            dot.stack(shape, options["rngs"])
        value = nnx.data(quantized)
    setattr(module, op.name, value)
    if isinstance(module, nnx.LinearGeneral):
        module.dot_general_cls = None  # takes precedence over dot_general


def _stack_shape(layer: MatchedLayer) -> tuple[int, ...]:
    """The numbers of layers in the stacks that a layer is; empty for one layer.

    Raises:
      ValueError: the axes of stacks are not the leading ones of the kernel.
    """
    module = layer.module
    if isinstance(module, nnx.Linear):
        one: tuple[int, ...] = module.in_features, module.out_features
    elif isinstance(module, nnx.Einsum | nnx.Conv | GroupedDense):
        one = tuple(module.kernel_shape)
    elif isinstance(module, nnx.LinearGeneral):
        batch_axes = module.batch_axis.values()
        one = *batch_axes, *module.in_features, *module.out_features
    else:
        return ()
    return stack_axes(layer.path, module.kernel.shape, one)


def stack_axes(
    path: str, shape: tuple[int, ...], one: tuple[int, ...]
) -> tuple[int, ...]:
    """The leading axes that a layer's parameter has more than the one of one layer.

    Raises:
      ValueError: the axes of stacks are not the leading ones.
    """
    axes = len(shape) - len(one)
    if shape[axes:] != one:
        raise ValueError(
            f"layer {path!r} has a parameter of shape {shape}, of which one layer's is "
            f"{one}: a stack of layers has its axes first, as nnx.vmap makes it; or "
            "apply rules where one of the layers is made, inside nnx.vmap"
        )
    return shape[:axes]
