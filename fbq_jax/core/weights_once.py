"""Weights that are quantized once, before a loop over microbatches.

A training step that accumulates gradients calls its model once for each microbatch with
the same parameters.  JAX does not move computations out of a loop, and XLA moves none
out of a scan over layers inside it.  So ``quantize_weights_once`` traces the function
that the loop calls, finds the marked functions of weights that depend on parameters
only, and computes them beforehand; the function then reads the codes.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from fbq_jax.core.weight_products import inner_jaxpr, scan_sizes
from fbq_jax.sharding.layer_names import current_layer

Results = TypeVar("Results")

_MARK = "fbq_jax_once_"
# The names of primitives that call a jaxpr: of ``jax.checkpoint``, and all.
_REMAT = frozenset({"checkpoint", "remat2"})
_CALLS = _REMAT | {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}
# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_layers = jax.make_user_context(None)


def quantize_weights_once(
    function: Callable[..., Results], params: Any, *args: Any
) -> Callable[..., Results]:
    """Fixes the parameters of a function, and quantizes its weights here and now.

    A step that accumulates gradients calls this before its loop over microbatches, so
    that it quantizes each weight once, and not once for each microbatch::

        gradients = quantize_weights_once(jax.value_and_grad(loss), params, batches[0])
        for batch in batches:  # or jax.lax.scan
            value, grads = gradients(batch)

    Results do not change, because weights are rounded to nearest.  It takes
    ``dot_general`` and all layers of a ``FallbackDot``, in Linen and NNX, scanned or
    not.  The codes of weights, two bytes per parameter, are in memory until the loop
    ends, sharded as the weights are.  ``Fp8Dot``, ``LlmInt8Dot`` and the INT8 data flow
    quantize in every call.

    Args:
      function: maps ``(params, *args)`` to a tree of arrays.  It takes the gradient
        itself, as ``jax.value_and_grad(loss)`` does: the result is not to be
        differentiated.
      params: a tree of arrays.
      *args: trees of arrays, or ``jax.ShapeDtypeStruct``, like those that the loop
        passes; only shapes and dtypes are read.

    Returns:
      A function of ``args`` with the results of ``function(params, *args)``.

    Raises:
      TypeError: the returned function gets arguments of other structures, shapes or
        dtypes than ``args``.

    Warns:
      UserWarning: weights are quantized in every call, because they also depend on
        other arguments than ``params``, or are inside ``jax.lax.cond``,
        ``jax.lax.while_loop`` or ``jax.shard_map``.

    >>> import jax.numpy as jnp
    >>> from fbq_jax import dot_general
    >>> def loss(w, x):
    ...     y, _ = dot_general(x, w, (((1,), (0,)), ((), ())))
    ...     return jnp.mean(jnp.square(y))
    >>> w, batches = jnp.ones((64, 8)), jnp.ones((4, 16, 64))
    >>> gradient = quantize_weights_once(jax.grad(loss), w, batches[0])
    >>> grads = jax.lax.map(gradient, batches)
    >>> bool(jnp.all(grads[0] == jax.grad(loss)(w, batches[0])))
    True
    """
    layers: list[str | None] = []
    # A mark is the name of a jitted function.
    with _layers(_Layers(layers)), jax.disable_jit(False):
        closed, results = jax.make_jaxpr(function, return_shape=True)(params, *args)
    known = [_Known(x) for x in jax.tree.leaves(params)]
    shapes = [_Shape(x.shape, x.dtype) for x in closed.in_avals[len(known) :]]
    structure: Any = jax.tree.structure(args)
    codes, _ = _find(closed, [*known, *[None] * len(shapes)])
    if left := sorted(set(_left_marks(closed.jaxpr, codes))):
        names = dict.fromkeys(layers[mark] or "a layer without a name" for mark in left)
        warnings.warn(
            f"these layers quantize their weights in every call: {', '.join(names)}. "
            "quantize_weights_once takes weights that depend on params only, with "
            "nearest rounding, and that are not inside jax.lax.cond, "
            "jax.lax.while_loop or jax.shard_map",
            stacklevel=2,
        )

    def with_codes(*args: Any) -> Results:
        leaves, got = jax.tree.flatten(args)
        found = [_Shape(x.shape, x.dtype) for x in map(jax.typeof, leaves)]
        if got != structure or found != shapes:
            raise TypeError(
                f"this function was made for {_described(structure, shapes)}, and got "
                f"{_described(got, found)}: pass quantize_weights_once arguments of "
                "the shapes and dtypes that the loop passes"
            )
        out = _run(closed, [*(x.value for x in known), *leaves], codes)
        return jax.tree.unflatten(jax.tree.structure(results), out)

    return with_codes


def computed_once(function: Callable[..., Results]) -> Callable[..., Results]:
    """Marks a function of a weight that ``quantize_weights_once`` computes once."""
    if _layers.value is None:
        return function

    def marked(*args: Any) -> Results:
        return function(*args)

    layers = _layers.value.names
    marked.__name__ = f"{_MARK}{len(layers)}"
    layers.append(current_layer())
    marked_function: Callable[..., Results] = jax.jit(marked)
    return marked_function


@dataclasses.dataclass(frozen=True, eq=False)
class _Layers:
    """The layers of the marks, in order; hashable, as JAX's contexts must be."""

    names: list[str | None]


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def _described(structure: Any, shapes: list[_Shape]) -> Any:
    texts = [f"{x.dtype}{list(x.shape)}" for x in shapes]
    return jax.tree.unflatten(structure, texts)


class _Known(NamedTuple):
    """A value that depends on parameters only.

    Attributes:
      value: an array.
      of_codes: whether it depends on marked results, and so is not computed again.
    """

    value: Any
    of_codes: bool = False


class _ScanCodes(NamedTuple):
    """What is known of a scan.

    Attributes:
      codes: those of the body, stacked.
      results: by position among the scan's stacked results, those that are known.
    """

    codes: "_Codes"
    results: dict[int, jax.Array]


# The results of the marked equations of a jaxpr, by position; of an equation that has
# marked ones inside, their ``_Codes`` or ``_ScanCodes``.
_Codes = dict[int, Any]


def _find(
    closed: ClosedJaxpr, inputs: Sequence[_Known | None]
) -> tuple[_Codes, list[_Known | None]]:
    """Computes what is known of a jaxpr.

    Returns:
      The results of marked equations, and the known results of the jaxpr.
    """
    jaxpr, codes = closed.jaxpr, _Codes()
    values: dict[Var, _Known | None] = {
        var: _Known(const)
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> _Known | None:
        return _Known(x.val) if isinstance(x, Literal) else values[x]

    for position, eqn in enumerate(jaxpr.eqns):
        results, found = _find_in_equation(eqn, [read(x) for x in eqn.invars])
        if jax.tree.leaves(found):
            codes[position] = found
        values.update(zip(eqn.outvars, results, strict=True))
    return codes, [read(x) for x in jaxpr.outvars]


def _find_in_equation(
    eqn: Any, inputs: list[_Known | None]
) -> tuple[Sequence[_Known | None], Any]:
    """The known results of an equation, and what ``_Codes`` has of it."""
    for inner in _opened(eqn):
        if any(True for _ in _left_marks(inner.jaxpr, {})):
            if eqn.primitive.name == "scan":
                return _find_in_scan(eqn, inputs)
            codes, known_results = _find(inner, inputs)
            return known_results, codes
    known = [x for x in inputs if x is not None]
    if len(known) < len(inputs) or eqn.effects:
        return [None] * len(eqn.outvars), None
    results = _bind(eqn, [x.value for x in known])
    if _is_marked(eqn):
        return [_Known(x, of_codes=True) for x in results], results
    of_codes = any(x.of_codes for x in known)
    return [_Known(x, of_codes) for x in results], None


def _find_in_scan(
    eqn: Any, inputs: list[_Known | None]
) -> tuple[list[_Known | None], _ScanCodes]:
    body, (consts, carried) = eqn.params["jaxpr"], scan_sizes(eqn)
    stacked = inputs[consts + carried :]

    def step(_: None, slices: list[Any]) -> tuple[None, _ScanCodes]:
        own = [
            x and _Known(y, x.of_codes) for x, y in zip(stacked, slices, strict=True)
        ]
        codes, results = _find(body, [*inputs[:consts], *[None] * carried, *own])
        known = {
            position: result.value
            for position, result in enumerate(results[carried:])
            if result is not None and result.of_codes
        }
        return None, _ScanCodes(codes, known)

    slices = [x and x.value for x in stacked]
    _, found = lax.scan(step, None, slices, length=eqn.params["length"])
    results: list[_Known | None] = [None] * len(eqn.outvars)
    for position, result in found.results.items():
        results[carried + position] = _Known(result, of_codes=True)
    return results, found


def _run(closed: ClosedJaxpr, inputs: Sequence[Any], codes: _Codes) -> list[Any]:
    """Computes a jaxpr, but for what is known."""
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for position, eqn in enumerate(jaxpr.eqns):
        arguments = [read(x) for x in eqn.invars]
        if position not in codes:
            results = _bind(eqn, arguments)
        elif _is_marked(eqn):
            results = codes[position]
        elif eqn.primitive.name == "scan":
            results = _run_scan(eqn, arguments, codes[position])
        else:
            results = _run_inner(eqn, arguments, codes[position])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _run_scan(eqn: Any, inputs: list[Any], found: _ScanCodes) -> list[Any]:
    body, (consts, carried) = eqn.params["jaxpr"], scan_sizes(eqn)
    positions = range(len(eqn.outvars) - carried)

    def step(carry: list[Any], slices: Any) -> tuple[list[Any], dict[int, Any]]:
        stacked, codes = slices
        results = _run(body, [*inputs[:consts], *carry, *stacked], codes)
        computed = {
            position: results[carried + position]
            for position in positions
            if position not in found.results
        }
        return results[:carried], computed

    carry, computed = lax.scan(
        step,
        inputs[consts : consts + carried],
        (inputs[consts + carried :], found.codes),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    results = computed | found.results
    return [*carry, *(results[position] for position in positions)]


def _run_inner(eqn: Any, inputs: list[Any], codes: _Codes) -> list[Any]:
    (inner,) = _opened(eqn)

    def run(inputs: list[Any], codes: _Codes) -> list[Any]:
        return _run(inner, inputs, codes)

    if eqn.primitive.name in _REMAT:
        leaves = jax.tree.leaves(codes)
        closed = jax.make_jaxpr(run)(inputs, codes)
        assert not closed.consts
        cse = eqn.params["prevent_cse"]
        if isinstance(cse, tuple):
            cse = *cse, *[True] * len(leaves)
        changed = {"jaxpr": closed.jaxpr, "prevent_cse": cse}
        return _bind(eqn, [*inputs, *leaves], **changed)
    run.__name__ = eqn.params.get("name", run.__name__)
    return jax.jit(run)(inputs, codes)


def _bind(eqn: Any, inputs: Sequence[Any], **changed: Any) -> Any:
    """The results of an equation, in the scopes that it was traced in."""
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=names), eqn.ctx.manager:
        results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]


def _is_marked(eqn: Any) -> bool:
    return str(eqn.params.get("name")).startswith(_MARK)


def _opened(eqn: Any) -> Iterator[ClosedJaxpr]:
    """The jaxpr inside an equation, if codes can be brought into it."""
    name, params = eqn.primitive.name, eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if name == "scan":
        yield params["jaxpr"]
    elif (
        name in _CALLS
        and not _is_marked(eqn)
        and not any(isinstance(x, jax.sharding.Sharding) for x in shardings)
        and (inner := inner_jaxpr(eqn)) is not None
    ):
        yield inner


def _left_marks(jaxpr: Jaxpr, codes: _Codes) -> Iterator[int]:
    """The numbers of the marks whose results ``codes`` lacks."""
    for position, eqn in enumerate(jaxpr.eqns):
        found = codes.get(position, {})
        if not _is_marked(eqn):
            inner_codes = found.codes if isinstance(found, _ScanCodes) else found
            for inner in _jaxprs_inside(eqn):
                yield from _left_marks(inner, inner_codes)
        elif not found and eqn.outvars:  # JAX may have split it, and left none
            yield int(eqn.params["name"].removeprefix(_MARK))


def _jaxprs_inside(eqn: Any) -> Iterator[Jaxpr]:
    values = list(eqn.params.values())
    for value in jax.tree.leaves(values, is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (ClosedJaxpr, Jaxpr))
