"""Rules for Flax NNX models: the path of each layer decides its recipe."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
from fbq_jax.nnx.naming import name_layers
from fbq_jax.nnx.tracing import (
    matrices_of,
    parameter_paths,
    read_parameters,
    trace_products,
)
from fbq_jax.recipes import fallback, path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import (
    FloatProduct,
    QuantizedParameter,
    RulesReport,
    rules_report,
    warn_of_idle_rules,
)
from fbq_jax.recipes.schema import Recipe


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
        found = quantize_layers(
            model,
            pairs,
            rngs=quantize_rngs,
            implementation=implementation,
            ignore_precision=ignore_precision,
        )
        name_layers(model)
        floats = shared_parameters(model, found)
        if args or kwargs:
            try:
                with _record_floats(model, pairs, found, floats):
                    products = trace_products(model, args, kwargs)
            except (TypeError, ValueError) as error:
                if args and _is_random_state(args[0]):
                    raise TypeError(
                        "fbq_jax.nnx.quantize takes no key, and its seeds by keyword: "
                        "quantize(model, rules, x, quantize_rngs=nnx.Rngs(0)); the "
                        "arguments of the model's call begin with "
                        f"{type(args[0]).__name__} here"
                    ) from error
                raise
            drop_unused_ops(model, pairs, found, products, args, kwargs)
        else:
            products = _expected_products(model, pairs, found)
        blocks = _paths_of_blocks(model)
        matrices = {
            path: shape
            for path, shape in matrices_of(model).items()
            if not path.startswith(blocks)
        }
    report = rules_report(pairs, found, matrices, products, (), floats)
    warn_of_idle_rules(pairs, report, stacklevel=2)
    return report


def shared_parameters(
    model: nnx.Module, found: Mapping[str, str | None]
) -> list[FloatProduct]:
    """The layers whose parameters have the paths of other modules, as a tied head's.

    Args:
      model: the model.
      found: maps the path of each layer to its pattern.
    """
    names, modules = parameter_paths(model), dict(nnx.iter_modules(model))
    return [
        FloatProduct(path, names[id(value)])
        for path, module in ((_join(parts), m) for parts, m in modules.items())
        if path in found
        for value in vars(module).values()
        if isinstance(value, nnx.Param)
    ]


@contextlib.contextmanager
def _record_floats(
    model: nnx.Module,
    rules: Pairs,
    found: Mapping[str, str | None],
    floats: list[FloatProduct],
) -> Iterator[None]:
    """Records the products of modules that rules leave in float, which have no ops.

    Flax's layers multiply by parameters of their own.
    """

    def record(path: str, op: LayerOp, *args: Any, **kwargs: Any) -> jax.Array:
        arrays = [x for x in (*args, kwargs.get("rhs")) if hasattr(x, "shape")]
        floats.append(FloatProduct(path, arrays[-1].shape))
        return op.unquantized(*args, **kwargs)

    recipes, changed = dict(rules), []
    for parts, module in nnx.iter_modules(model):
        pattern, op = found.get(path := _join(parts)), _op_of(module)
        if isinstance(module, Layer) or op is None or pattern is None:
            continue
        if recipes[pattern] is None:
            changed.append((module, op))
            op_in_trace = functools.partial(record, path, op)
            setattr(module, op.name, nnx.static(op_in_trace))
    try:
        yield
    finally:
        for module, op in changed:
            setattr(module, op.name, nnx.static(op.unquantized))


def take_rngs(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    quantize_rngs: nnx.Rngs | None,
) -> nnx.Rngs | None:
    """The ``quantize_rngs`` of a call, which once was ``rngs``.

    The model's own call may take ``rngs``, and then gets them.

    Args:
      model: a model that ``quantize`` was given.
      args: the arguments of the model's call.
      kwargs: the keyword arguments of ``quantize`` that are not its own.  Loses
        ``rngs`` if they are its own.
      quantize_rngs: what ``quantize`` was given.
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


def drop_unused_ops(
    model: nnx.Module,
    rules: Pairs,
    found: Mapping[str, str | None],
    products: Iterable[QuantizedParameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Takes the ops back from layers whose weight a call reads without them.

    Such an op would look like a layer that never trains.  A layer that did not run
    keeps its op.

    Args:
      model: changed in place.
      rules: all rules.
      found: maps the path of each layer to the pattern that matched it, or None.
      products: the quantized products of the call.
      args: the arguments of the call.
      kwargs: keyword arguments of the call.
    """
    recipes, reached = dict(rules), {product.layer for product in products}
    names = parameter_paths(model)
    weights: dict[str, tuple[str, nnx.Module]] = {}
    for parts, module in nnx.iter_modules(model):
        path = _join(parts)
        pattern = None if path in reached else found.get(path)
        # A module that multiplies in its own code takes no op.
        if pattern is None or recipes[pattern] is None or _op_of(module) is None:
            continue
        for value in vars(module).values():
            if isinstance(value, nnx.Param) and getattr(value, "ndim", 0) >= 2:
                weights[names[id(value)]] = path, module
    try:
        read = read_parameters(model, weights, (), args, kwargs)
    except UnknownDependentsError:
        return  # the report says which layers no op reached
    for name in read:
        path, module = weights[name]
        if (op := _op_of(module)) is not None:
            _set_op(path, module, op, None, rngs=None)


def _paths_of_blocks(model: nnx.Module) -> tuple[str, ...]:
    """How the parameters of blocks begin whose own operators quantize them."""
    modules = nnx.iter_modules(model)
    blocks = [_join(path) for path, module in modules if isinstance(module, Block)]
    return tuple(f"{path}/".lstrip("/") for path in blocks)


def _expected_products(
    model: nnx.Module, rules: Pairs, found: Mapping[str, str | None]
) -> list[QuantizedParameter]:
    """The quantized products of layers, by the kinds of the layers."""
    expected, recipes, names = [], dict(rules), parameter_paths(model)
    for parts, module in nnx.iter_modules(model):
        path = _join(parts)
        pattern = found.get(path)
        recipe = None if pattern is None else recipes[pattern]
        if recipe is None:
            continue
        if isinstance(module, Layer):
            weights = [module.kernel]
        else:
            params = (x for x in vars(module).values() if isinstance(x, nnx.Param))
            weights = [x for x in params if getattr(x, "ndim", 0) >= 2]
        if len(weights) == 1:
            (weight,) = weights
            row = names[id(weight)], weight.shape, path, None, recipe
            expected.append(QuantizedParameter(*row))
    return expected


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
        # A module's own ``==`` may be anything.
        if value is None or value is op.unquantized or isinstance(value, op.quantized):
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
    return stack_axes(path, layer.kernel.shape, one)


def stack_axes(
    path: str, shape: tuple[int, ...], one: tuple[int, ...]
) -> tuple[int, ...]:
    """The leading axes that a parameter has more than one layer's.

    Args:
      path: the path of the layer.
      shape: the shape of its parameter.
      one: the shape that one layer's parameter has.

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
