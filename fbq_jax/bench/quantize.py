"""Quantization by the bytes it has to move, against a copy on the same device."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.bench import data, matmuls, measure
from fbq_jax.bench.measure import Effort, Timing
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.kernels.reference import CodeDtype, FallbackQuantized
from fbq_jax.ops import dispatch

SHAPES = ((8192, 4096), (8192, 14336), (4096, 14336))
RATES = (0.0, 0.2)
COPY_SHAPE = (16384, 16384)
# Calls in a timed program. A host may need longer to start a program than one call
# takes; in a training step, calls do not wait for that.
_CALLS = 8
_SIDE = 128
_BLOCK = (_SIDE, _SIDE)


class _Case(NamedTuple):
    """One op to measure.

    Attributes:
      what: the op's name in the table.
      op: a function of ``fbq_jax.ops``.
      options: its keyword arguments.
      args: its arrays; the first is the operand.
      moved_bytes: the bytes that must be read and written.
      fallback: the share of blocks that fall back; None without fallback.
    """

    what: str
    op: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[jax.Array, ...]
    moved_bytes: float
    fallback: float | None = None


def rows(
    shapes: Sequence[tuple[int, ...]],
    rates: Sequence[float] = RATES,
    copy_shape: tuple[int, ...] = COPY_SHAPE,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures a copy, then the kinds of quantization of each bf16 shape.

    Work counts the bytes that must move: the operand once, the stored codes, scales
    and metrics, and the residual codes of blocks that fall back.

    Raises:
      WrongResultError: if codes, scales or metrics differ from the reference.
    """
    choice = dispatch.choose("quantize", _BLOCK, implementation=implementation)
    measured = (
        _measure(case, choice, effort)
        for shape in shapes
        for case in _cases(shape, rates, choice.implementation)
    )
    yield from with_ratios(itertools.chain([_copy(copy_shape, effort)], measured))


def _measure(case: _Case, choice: dispatch.Choice, effort: Effort) -> Row:
    shape = case.args[0].shape[1:]
    run = measure.jitted(case.op, implementation=choice.implementation, **case.options)
    reference = measure.jitted(case.op, implementation="reference", **case.options)
    error = _differing(run(*case.args), reference(*case.args))
    measure.require(error, 0.0, f"{case.what} of {shape} by {choice.backend}")
    return row(
        _timing(run, case.args, effort),
        case.moved_bytes,
        what=case.what,
        implementation=choice.backend,
        shape=shape,
        fallback=case.fallback,
        errors={"differ": error},
    )


def _timing(op: Callable[..., Any], args: tuple[Any, ...], effort: Effort) -> Timing:
    """The time of one of several calls in a program."""
    several = [args] * _CALLS
    program = jax.jit(lambda calls: [op(*call) for call in calls])
    timing = measure.timing(program, several, effort=effort)
    return timing._replace(ms=timing.ms / _CALLS, burst_ms=timing.burst_ms / _CALLS)


def _cases(
    shape: tuple[int, ...], rates: Sequence[float], implementation: str
) -> Iterator[_Case]:
    x = data.activation(jax.random.key(0), (1, *shape))
    seeds = jnp.ones(1, jnp.uint32)
    fallback_options = {"block": _BLOCK, "criterion": "absmax", "colwise": "stochastic"}
    metric = ops.quantize_fallback(
        x, jnp.zeros(1), seeds, implementation=implementation, **fallback_options
    ).metric
    # Both layouts have codes and scales. All scales have the size of the metric.
    moved = x.nbytes + 2.0 * (x.size + metric.nbytes)
    for rounding in ("nearest", "stochastic"):
        rounded = {"block": _BLOCK, "rowwise": rounding, "colwise": rounding}
        yield _Case(rounding, ops.quantize, rounded, (x, seeds), moved)
    yield from _row_cases(x, seeds, implementation)
    ascending = jnp.sort(metric.reshape(-1))
    for rate in rates:
        theta = ascending[metric.size - 1 - round(rate * metric.size)]
        fallback = float(jnp.mean(metric > theta, dtype=jnp.float32))
        residual_and_metric = fallback * x.size + 2 * metric.nbytes
        yield _Case(
            "fallback",
            ops.quantize_fallback,
            fallback_options,
            (x, theta[None], seeds),
            moved + residual_and_metric,
            fallback,
        )


def _row_cases(x: jax.Array, seeds: jax.Array, implementation: str) -> Iterator[_Case]:
    """Scales of rows and columns in blocks."""
    _, rows, columns = x.shape
    scales = rows * -(-columns // _SIDE) + columns * -(-rows // _SIDE)
    cases: dict[str, dict[str, str]] = {
        "row_block": {"rowwise": "nearest", "colwise": "stochastic"}
    }
    float8: CodeDtype = "float8_e4m3fn"
    if matmuls.can_multiply(float8, (1, _SIDE, 1), implementation):
        nearest = {"rowwise": "nearest", "colwise": "nearest"}
        cases["row_block, FP8"] = {**nearest, "dtype": float8}
    for name, options in cases.items():
        yield _Case(
            name,
            ops.quantize_row_blocks,
            {"block": _BLOCK, **options},
            (x, seeds),
            x.nbytes + 2.0 * x.size + 4 * scales,
        )


def _copy(shape: tuple[int, ...], effort: Effort) -> Row:
    """The faster of a copy and an element-wise program on one large array."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    programs = {"copy": jax.jit(jnp.copy), "copy, x + 1": jax.jit(lambda x: x + 1)}
    copies = []
    for what, program in programs.items():
        if program(x).unsafe_buffer_pointer() == x.unsafe_buffer_pointer():
            raise measure.WrongResultError(f"{what} returned its argument's memory")
        timing = measure.timing(program, x, effort=effort)
        if timing.burst_of == "calls":
            # The profiler sees no kernel in a plain copy, but a copy draws too little
            # power to be slowed down: its burst takes as long.
            timing = timing._replace(burst_ms=timing.ms)
        copies.append(
            row(timing, 2 * x.nbytes, what=what, implementation="xla", shape=shape)
        )
    return min(copies, key=lambda row: row.ms)


def _differing(actual: Any, expected: Any) -> float:
    """The share of values that differ, without residual codes that are not read."""
    if isinstance(actual, FallbackQuantized) and actual.residual is not None:
        codes, scales, _ = actual.residual
        _, rows, columns = codes.shape
        is_read = jnp.repeat(jnp.repeat(scales > 0.0, _SIDE, axis=1), _SIDE, axis=2)
        codes = jnp.where(is_read[:, :rows, :columns], codes, 0)
        actual = actual._replace(residual=actual.residual._replace(codes=codes))
    return float(_share_differing(actual, expected))


@jax.jit
def _share_differing(actual: Any, expected: Any) -> jax.Array:
    different = [
        jnp.sum(a != b, dtype=jnp.float32)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]
    return sum(different) / sum(a.size for a in jax.tree.leaves(actual))
