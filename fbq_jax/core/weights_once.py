"""Weights that are quantized once, before a loop over microbatches.

A training step that accumulates gradients calls its model once for each microbatch with
the same parameters.  JAX does not move computations out of this loop, and XLA moves
none out of a scan over layers inside it.  So ``quantize_weights_once`` traces the
function that the loop calls, finds the marked functions of weights that depend on
parameters only, and computes them beforehand; the function then reads the codes.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from fbq_jax.core.weight_products import inner_jaxpr, jaxprs_inside, scan_sizes
from fbq_jax.sharding.layer_names import current_layer

Results = TypeVar("Results")

_MARK = "fbq_jax_once_"
# The names of primitives that call a jaxpr: of ``jax.checkpoint``, and all.
_REMAT = frozenset({"checkpoint", "remat2"})
_CALLS = _REMAT.union(
    ("closed_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "pjit")
)
# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_layers = jax.make_user_context(None)


def quantize_weights_once(
    function: Callable[..., Results], params: Any, *args: Any
) -> Callable[..., Results]:
    """Fixes the parameters of a function, and quantizes its weights here and now.

    A jitted step that accumulates gradients calls this before its loop over
    microbatches, so that it quantizes each weight once, and not once for each
    microbatch::

        gradients = quantize_weights_once(jax.value_and_grad(loss), params, batches[0])
        values, grads = jax.lax.map(gradients, batches)

    Results do not change, because weights are rounded to nearest.  It takes
    ``dot_general`` and all layers of a ``FallbackDot``, in Linen and NNX, scanned or
    not.  The codes of weights, with a gradient two bytes per parameter, are in memory
    until the loop ends, sharded as the weights are.  ``Fp8Dot``, ``LlmInt8Dot`` and the
    INT8 data flow quantize in every call.

    Args:
      function: maps ``(params, *args)`` to a tree of arrays.  It takes the gradient
        itself, as ``jax.value_and_grad(loss)`` does: the result is not to be
        differentiated.
      params: a tree of arrays.
      *args: trees of arrays, or of ``jax.ShapeDtypeStruct``, with the types of those
        that the loop passes; their values are not read.

    Returns:
      A function of ``args`` with the results of ``function(params, *args)``.

    Raises:
      TypeError: the returned function gets arguments of another structure or of other
        types: shape, dtype, weak or not, and over manual and explicit mesh axes whether
        they vary and how they are sharded.

    Warns:
      UserWarning: weights are quantized in every call, because they also depend on
        other arguments than ``params`` or on what a loop carries, or are inside
        ``jax.lax.cond``, ``jax.lax.while_loop`` or ``jax.shard_map``.

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
    types = [str(x) for x in closed.in_avals[len(known) :]]
    structure: Any = jax.tree.structure(args)
    codes, _ = _find(closed, [*known, *[None] * len(types)], {})
    if left := sorted(set(_left_marks(closed.jaxpr, codes))):
        names = dict.fromkeys(layers[mark] or "a layer without a name" for mark in left)
        warnings.warn(
            f"these layers quantize their weights in every call: {', '.join(names)}. "
            "quantize_weights_once takes weights that depend on params only, not on "
            "what a loop carries, with nearest rounding, and that are not inside "
            "jax.lax.cond, jax.lax.while_loop or jax.shard_map",
            stacklevel=2,
        )
    run = jax.jit(functools.partial(_run, closed))
    values = [x.value for x in known]

    def with_codes(*args: Any) -> Results:
        leaves, got = jax.tree.flatten(args)
        found = [str(jax.typeof(x)) for x in leaves]
        if got != structure or found != types:
            raise TypeError(
                f"this function was made for {jax.tree.unflatten(structure, types)}, "
                f"and got {jax.tree.unflatten(got, found)}: pass quantize_weights_once "
                "arguments of the types that the loop passes"
            )
        out = run([*values, *leaves], codes)
        return jax.tree.unflatten(jax.tree.structure(results), out)

    return with_codes


def mark_constant(function: Callable[..., Results]) -> Callable[..., Results]:
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
      constant: the codes of its body that depend on the scan's constants only.
      sliced: the other codes of its body, stacked.
      results: by position among the scan's stacked results, those that depend on
        ``sliced``.
    """

    constant: "_Codes"
    sliced: "_Codes"
    results: dict[int, jax.Array]


# The results of the marked equations of a jaxpr, by position; of an equation that has
# marked ones inside, their ``_Codes`` or ``_ScanCodes``.
_Codes = dict[int, Any]


def _find(
    closed: ClosedJaxpr, inputs: Sequence[_Known | None], earlier: _Codes
) -> tuple[_Codes, list[_Known | None]]:
    """Computes what is known of a jaxpr.

    Returns:
      The results of marked equations that ``earlier`` lacks, and the known results of
      the jaxpr.
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
        with _scopes_of(eqn):
            results, found = _find_in_equation(
                eqn, [read(x) for x in eqn.invars], earlier.get(position)
            )
        if jax.tree.leaves(found):
            codes[position] = found
        values.update(zip(eqn.outvars, results, strict=True))
    return codes, [read(x) for x in jaxpr.outvars]


def _find_in_equation(
    eqn: Any, inputs: list[_Known | None], earlier: Any
) -> tuple[Sequence[_Known | None], Any]:
    """The known results of an equation, and what ``_Codes`` has of it."""
    for inner in _opened(eqn):
        if any(True for _ in _left_marks(inner.jaxpr, {})):
            if eqn.primitive.name == "scan":
                return _find_in_scan(eqn, inputs, earlier or _ScanCodes({}, {}, {}))
            codes, known_results = _find(inner, inputs, earlier or {})
            return known_results, codes
    known = [x for x in inputs if x is not None]
    if len(known) < len(inputs) or eqn.effects:
        return [None] * len(eqn.outvars), None
    results = _bind(eqn, [x.value for x in known])
    if _is_marked(eqn):
        found = None if earlier else results
        return [_Known(x, of_codes=True) for x in results], found
    of_codes = any(x.of_codes for x in known)
    return [_Known(x, of_codes) for x in results], None


def _find_in_scan(
    eqn: Any, inputs: list[_Known | None], earlier: _ScanCodes
) -> tuple[list[_Known | None], _ScanCodes]:
    """``_find_in_equation`` of a scan.

    What depends on its constants only is computed once, not in each of its steps.
    """
    body, (consts, carried) = eqn.params["jaxpr"], scan_sizes(eqn)
    constants, stacked = inputs[:consts], inputs[consts + carried :]
    unknown = [None] * (carried + len(stacked))
    constant, of_constants = _find(body, [*constants, *unknown], earlier.constant)
    found_before = _union(earlier.constant, _union(constant, earlier.sliced))
    of_codes: dict[int, bool] = {}

    def step(_: None, slices: list[Any]) -> tuple[None, Any]:
        own = [
            x and _Known(y, x.of_codes) for x, y in zip(stacked, slices, strict=True)
        ]
        known = [*constants, *[None] * carried, *own]
        sliced, results = _find(body, known, found_before)
        found = {i: x for i, x in enumerate(results[carried:]) if x is not None}
        of_codes.update({i: x.of_codes for i, x in found.items()})
        values = {i: x.value for i, x in found.items()}
        return None, (sliced, values)

    slices = [x and x.value for x in stacked]
    length = eqn.params["length"]
    _, (sliced, values) = lax.scan(step, None, slices, length=length)
    results: list[_Known | None] = [None] * len(eqn.outvars)
    kept = {}
    for position, value in values.items():
        results[carried + position] = _Known(value, of_codes[position])
        # What depends on constants only would be the same value, stacked.
        if of_codes[position] and of_constants[carried + position] is None:
            kept[position] = value
    return results, _ScanCodes(constant, sliced, kept)


def _union(one: _Codes, other: _Codes) -> _Codes:
    """All codes of two parts."""
    union = one | other
    for position in one.keys() & other.keys():
        first, second = one[position], other[position]
        if isinstance(first, _ScanCodes):
            union[position] = _ScanCodes(
                _union(first.constant, second.constant),
                _union(first.sliced, second.sliced),
                first.results | second.results,
            )
        else:
            union[position] = _union(first, second)
    return union


def _run(closed: ClosedJaxpr, inputs: Sequence[Any], codes: _Codes) -> list[Any]:
    """Computes a jaxpr, with the results of marked equations that are known."""
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for position, eqn in enumerate(jaxpr.eqns):
        arguments = [read(x) for x in eqn.invars]
        with _scopes_of(eqn):
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
        stacked, sliced = slices
        codes = _union(found.constant, sliced)
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
        (inputs[consts + carried :], found.sliced),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    results = computed | found.results
    return [*carry, *(results[position] for position in positions)]


def _run_inner(eqn: Any, inputs: list[Any], codes: _Codes) -> list[Any]:
    (inner,) = _opened(eqn)
    params = eqn.params

    def run(inputs: list[Any], codes: _Codes) -> list[Any]:
        return _run(inner, inputs, codes)

    if eqn.primitive.name in _REMAT:
        leaves = jax.tree.leaves(codes)
        closed = jax.make_jaxpr(run)(inputs, codes)
        assert not closed.consts
        cse = params["prevent_cse"]
        if isinstance(cse, tuple):
            cse = *cse, *[True] * len(leaves)
        changed = {"jaxpr": closed.jaxpr, "prevent_cse": cse}
        return _bind(eqn, [*inputs, *leaves], **changed)
    run.__name__ = params.get("name", run.__name__)
    inputs = _constrained(inputs, params.get("in_shardings"))
    return _constrained(jax.jit(run)(inputs, codes), params.get("out_shardings"))


def _constrained(values: list[Any], shardings: Sequence[Any] | None) -> list[Any]:
    """Values with the shardings that a jitted function was given, where it was."""
    return [
        lax.with_sharding_constraint(x, sharding)
        if isinstance(sharding, jax.sharding.Sharding)
        else x
        for x, sharding in zip(values, shardings or [None] * len(values), strict=True)
    ]


def _bind(eqn: Any, inputs: Sequence[Any], **changed: Any) -> Any:
    """The results of an equation."""
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def _scopes_of(eqn: Any) -> Iterator[None]:
    """The named scopes and the mesh that an equation was traced in."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=names), eqn.ctx.manager:
        yield


def _is_marked(eqn: Any) -> bool:
    return str(eqn.params.get("name")).startswith(_MARK)


def _opened(eqn: Any) -> Iterator[ClosedJaxpr]:
    """The jaxpr inside an equation, if codes can be brought into it."""
    if eqn.primitive.name == "scan":
        yield eqn.params["jaxpr"]
    elif eqn.primitive.name in _CALLS and not _is_marked(eqn):
        inner = inner_jaxpr(eqn)
        if inner is not None:
            yield inner


def _left_marks(jaxpr: Jaxpr, codes: _Codes) -> Iterator[int]:
    """The numbers of the marks whose results ``codes`` lacks."""
    for position, eqn in enumerate(jaxpr.eqns):
        found = codes.get(position, {})
        if not _is_marked(eqn):
            if isinstance(found, _ScanCodes):
                found = _union(found.constant, found.sliced)
            for inner in jaxprs_inside(eqn):
                yield from _left_marks(inner, found)
        elif not found and eqn.outvars:  # JAX may have split it, and left none
            yield int(eqn.params["name"].removeprefix(_MARK))
