"""Rules for Flax NNX models: the path of each layer decides its recipe."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax.core import weight_products
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.weight_marks import QuantizedProduct, record_products
from fbq_jax.core.weight_products import (
    ParameterUse,
    find_uses,
    split_arrays,
)
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
from fbq_jax.nnx.naming import name_layers
from fbq_jax.recipes import fallback, path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import RulesReport, warn_of_idle_rules
from fbq_jax.recipes.schema import Recipe


def quantize(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *args: Any,
    rngs: nnx.Rngs | None = None,
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
    ``fbq_jax.integrations.qwix.quantize_nnx`` reaches them.

    Args:
      model: changed in place; an error leaves it unchanged.
      rules: a mapping from patterns of paths, such as ``"blocks/0/mlp/up"``, to
        recipes, tried in order (``fbq_jax.recipes.path_rules``).
      *args: the arguments of a call of the model; arrays may be
        ``jax.ShapeDtypeStruct``.  The call is traced, and the report says what it does
        with each parameter.  A layer whose weight it reads without the layer's op gets
        the unquantized op.  Without any arguments nothing is traced, and the report
        goes by the kinds of the layers.
      rngs: seeds the noise of the layers, as in ``FallbackDot``.
      implementation: the implementation of the layers' ops, as in ``FallbackDot``.
      ignore_precision: whether to quantize products that ask for a precision, such as
        HIGHEST; otherwise they are errors.
      **kwargs: keyword arguments of the same call.

    Returns:
      The rule of each layer, the rules that apply to no layer, the layers without a
      rule, and what became of each parameter.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None, or the model is not
        one of NNX.
      ValueError: a pattern is not a regular expression, or no implementation has this
        name; Qwix changed the model; a layer is frozen; a matched layer is a stack of
        layers whose axis is not the first; or a rule is for products of two
        activations, which ``fbq_jax.integrations.qwix.quantize_nnx`` reaches.

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
    remedy = "fbq_jax.integrations.qwix.quantize_nnx"
    check_unchanged_by_qwix(model, remedy)
    path_rules.refuse_activations_rules(pairs, f"use {remedy}")
    with unchanged_on_error(model):
        found = quantize_layers(
            model,
            pairs,
            rngs=rngs,
            implementation=implementation,
            ignore_precision=ignore_precision,
        )
        name_layers(model)
        if args or kwargs:
            try:
                traced = trace_parameters(model, args, kwargs)
            except (TypeError, ValueError) as error:
                if args and _is_random_state(args[0]):
                    raise TypeError(
                        "fbq_jax.nnx.quantize takes no key, and rngs by keyword: "
                        "quantize(model, rules, x, rngs=nnx.Rngs(0)); the arguments of "
                        f"the model's call begin with {type(args[0]).__name__} here"
                    ) from error
                raise
            drop_unused_ops(model, pairs, found, traced)
            own = _paths_of_blocks(model)
            parameters = [row for row in traced if not row[0].startswith(own)]
        else:
            parameters = _expected_parameters(model, pairs, found)
    report = weight_products.report(pairs, found, parameters)
    warn_of_idle_rules(pairs, report, stacklevel=2)
    return report


@contextlib.contextmanager
def unchanged_on_error(model: nnx.Module) -> Iterator[None]:
    """After an error, gives each module of a model its class and fields back."""
    before = [
        (module, type(module), dict(vars(module)))
        for _, module in nnx.iter_modules(model)
    ]
    try:
        yield
    except BaseException:
        for module, kind, fields in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(fields)
        raise


def quantize_layers(
    model: nnx.Module,
    rules: Pairs,
    *,
    rngs: nnx.Rngs | None,
    implementation: str | None,
    ignore_precision: bool,
) -> dict[str, str | None]:
    """Gives each layer that takes an op its own; see ``quantize``.

    Returns:
      Maps the path of each such layer to the pattern that matched it, or None.
    """
    check_nnx("quantize", model)
    DotConfig(fallback, implementation)  # checks the implementation
    for _, module in nnx.iter_modules(model):
        if isinstance(module, FallbackDot) and module.weight is not None:
            raise ValueError(
                f"layer {module.layer!r} is frozen, and another op would lose its "
                "codes: quantize takes the model from before it was frozen"
            )
    found: dict[str, str | None] = {}
    matched: list[tuple[str, nnx.Module, LayerOp, Recipe | None]] = []
    for parts, module in nnx.iter_modules(model):
        if (op := _op_of(module)) is None:
            continue
        path = _join(parts)
        found[path], recipe = path_rules.first_match(rules, path)
        if recipe is not None and isinstance(module, Layer):
            stack_shape(path, module)  # raises an error before anything changes
        if found[path] is not None:
            matched.append((path, module, op, recipe))
    for path, layer, op, recipe in matched:
        _set_op(
            path,
            layer,
            op,
            recipe,
            rngs=rngs,
            implementation=implementation,
            ignore_precision=ignore_precision,
        )
    return found


def trace_parameters(
    model: nnx.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...], ParameterUse]]:
    """The path, the shape and the use of each parameter; computes nothing.

    Args:
      model: does not change.
      args: the arguments of a call; arrays may be ``jax.ShapeDtypeStruct``.
      kwargs: keyword arguments of the same call.
    """
    arrays, rebuild = split_arrays((args, kwargs))
    split: Any = nnx.split(model, nnx.Param, ...)
    graphdef, parameters, others = split

    def call(parameters: Any, others: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        merged: Any = nnx.merge(graphdef, parameters, others)
        merged(*args, **kwargs)

    leaves = jax.tree.leaves_with_path(parameters)
    with record_products() as recorder:
        closed = jax.make_jaxpr(call)(parameters, others, arrays)
    paths = {position: _path(keys) for position, (keys, _) in enumerate(leaves)}
    return find_uses(closed, paths, recorder, root=type(model).__name__)


def drop_unused_ops(
    model: nnx.Module,
    rules: Pairs,
    found: Mapping[str, str | None],
    parameters: Iterable[tuple[str, tuple[int, ...], ParameterUse]],
) -> None:
    """Takes the ops back from layers whose weight is read without them.

    Such an op would look like a layer that never trains.  A layer that did not run
    keeps its op.

    Args:
      model: changed in place.
      rules: all rules.
      found: maps the path of each layer to the pattern that matched it, or None.
      parameters: the path, the shape and the use of each parameter in a call.
    """
    recipes = dict(rules)
    read, quantized = set(), set()
    for path, shape, use in parameters:
        owner = path.rpartition("/")[0]
        if use.quantized or use.combined:
            quantized.add(owner)
        elif len(shape) - use.stacked >= 2 and (use.in_float or use.others):
            read.add(owner)
    for parts, layer in nnx.iter_modules(model):
        path = _join(parts)
        pattern = found.get(path) if path in read - quantized else None
        is_quantized = pattern is not None and recipes[pattern] is not None
        # A module that multiplies in its own code takes no op.
        if is_quantized and (op := _op_of(layer)) is not None:
            _set_op(path, layer, op, None, rngs=None)


def _paths_of_blocks(model: nnx.Module) -> tuple[str, ...]:
    """How the parameters of blocks begin whose own operators quantize them."""
    modules = nnx.iter_modules(model)
    blocks = [_join(path) for path, module in modules if isinstance(module, Block)]
    return tuple(f"{path}/".lstrip("/") for path in blocks)


def _expected_parameters(
    model: nnx.Module, rules: Pairs, found: Mapping[str, str | None]
) -> list[tuple[str, tuple[int, ...], ParameterUse]]:
    """What layers do with their parameters, by the kind of the layer."""
    modules = {_join(path): module for path, module in nnx.iter_modules(model)}
    of_blocks = _paths_of_blocks(model)
    recipes = dict(rules)
    expected = []
    for keys, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param)):
        path, use = _path(keys), ParameterUse()
        if path.startswith(of_blocks):
            continue
        layer, _, name = path.rpartition("/")
        pattern = found.get(layer)
        recipe = None if pattern is None else recipes[pattern]
        is_layer = isinstance(modules.get(layer), Layer)
        if layer not in found:
            use.without_op = type(modules.get(layer)).__name__
        elif is_layer and name != "kernel":
            use.others.add("add")
        elif recipe is None:
            use.in_float = True
        elif is_layer or leaf.ndim >= 2:
            use.quantized.append(QuantizedProduct(layer, leaf.shape, recipe))
        expected.append((path, leaf.shape, use))
    return expected


def _path(keys: tuple[Any, ...]) -> str:
    """The path of a leaf of ``nnx.State``."""
    return _join(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))


def _join(parts: Any) -> str:
    return "/".join(map(str, parts))


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
        if value in (None, op.unquantized) or isinstance(value, op.quantized):
            return op
    return None


def _set_op(
    path: str,
    layer: nnx.Module,
    op: LayerOp,
    recipe: Recipe | None,
    *,
    rngs: nnx.Rngs | None,
    **options: Any,
) -> None:
    """Gives a layer the op of a recipe, with the options of ``FallbackDot``.

    None is the unquantized op.
    """
    if recipe is None:
        value = nnx.static(op.unquantized)
    else:
        quantized = op.quantized(recipe, rngs=rngs, **options)
        if isinstance(layer, Layer) and (shape := stack_shape(path, layer)):
            dot = dot_of(quantized)
            assert dot is not None
            dot.stack(shape, rngs)
        value = nnx.data(quantized)
    setattr(layer, op.name, value)
    if isinstance(layer, nnx.LinearGeneral):
        layer.dot_general_cls = None  # takes precedence over dot_general


def stack_shape(path: str, layer: Layer) -> tuple[int, ...]:
    """The numbers of layers in the stacks that a layer is; empty for one layer.

    Raises:
      ValueError: the axes of stacks are not the leading ones of the kernel.
    """
    if isinstance(layer, nnx.Linear):
        one: tuple[int, ...] = layer.in_features, layer.out_features
    elif isinstance(layer, nnx.Einsum | nnx.Conv | GroupedDense):
        one = tuple(layer.kernel_shape)
    else:
        one = *layer.batch_axis.values(), *layer.in_features, *layer.out_features
    shape = layer.kernel.shape
    axes = len(shape) - len(one)
    if shape[axes:] != one:
        raise ValueError(
            f"layer {path!r} has a kernel of shape {shape}, of which one layer's is "
            f"{one}: a stack of layers has its axes first, as nnx.vmap makes it; or "
            "apply rules where one of the layers is made, inside nnx.vmap"
        )
    return shape[:axes]
