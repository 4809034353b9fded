"""Quantization by the bytes it has to move, against a copy on the same device."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.bench import data, measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.kernels.reference import FallbackQuantized
from fbq_jax.ops import dispatch

SHAPES = ((8192, 4096), (8192, 14336), (4096, 14336))
RATES = (0.0, 0.2)
COPY_SHAPE = (16384, 16384)
_SIDE = 128
_BLOCK = (_SIDE, _SIDE)
_FLOAT32_BYTES = 4


class _Case(NamedTuple):
    """One op to measure.

    Attributes:
      what: the op's name in the table.
      op: a function of ``fbq_jax.ops``.
      options: its keyword arguments.
      args: its arrays; the first is the operand.
      fallback: the share of blocks that fall back; None without fallback.
      layouts: INT8 values stored per element of the operand.
      per_block: float32 values stored per block.
    """

    what: str
    op: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[jax.Array, ...]
    fallback: float | None
    layouts: float
    per_block: int

    @property
    def moved_bytes(self) -> float:
        """Bytes that must be read and written."""
        x = self.args[0]
        blocks = math.prod(-(-size // _SIDE) for size in x.shape[1:])
        stored = self.layouts * x.size + self.per_block * blocks * _FLOAT32_BYTES
        return x.nbytes + stored


def rows(
    shapes: Sequence[tuple[int, ...]],
    rates: Sequence[float] = RATES,
    copy_shape: tuple[int, ...] = COPY_SHAPE,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures a copy, then plain and fallback quantization of each bf16 shape.

    Work counts the bytes that must move: the operand once, the stored codes, scales
    and metrics, and the residual codes of blocks that fall back.

    Raises:
      WrongResultError: if codes, scales or metrics differ from the reference.
    """
    choice = dispatch.choose("quantize", _BLOCK, implementation=implementation)
    copy = _copy(copy_shape, effort)
    yield copy
    for shape in shapes:
        for case in _cases(shape, rates, choice.implementation):
            yield _measure(case, shape, choice.implementation, copy, effort)


def _measure(
    case: _Case, shape: tuple[int, ...], implementation: str, copy: Row, effort: Effort
) -> Row:
    run = _jitted(case.op, implementation=implementation, **case.options)
    reference = _jitted(case.op, implementation="reference", **case.options)
    error = _differing(run(*case.args), reference(*case.args))
    measure.require(error, 0.0, f"{case.what} of {shape} by {implementation}")
    return row(
        measure.timing(run, *case.args, effort=effort),
        case.moved_bytes,
        copy,
        what=case.what,
        implementation=implementation,
        shape=shape,
        fallback=case.fallback,
        errors={"differ": error},
    )


@functools.cache
def _jitted(op: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A jitted op, which cases with the same options share."""
    return jax.jit(functools.partial(op, **options))


def _cases(
    shape: tuple[int, ...], rates: Sequence[float], implementation: str
) -> Iterator[_Case]:
    x = data.activation(jax.random.key(0), (1, *shape))
    seeds = jnp.ones(1, jnp.uint32)
    for rounding in ("nearest", "stochastic"):
        rounded = {"block": _BLOCK, "rowwise": rounding, "colwise": rounding}
        yield _Case(rounding, ops.quantize, rounded, (x, seeds), None, 2, 2)
    metric = ops.block_metric(
        x, block=_BLOCK, criterion="absmax", implementation=implementation
    )
    ascending = jnp.sort(metric.reshape(-1))
    for rate in rates:
        theta = ascending[metric.size - 1 - round(rate * metric.size)]
        fallback = float(jnp.mean(metric > theta, dtype=jnp.float32))
        yield _Case(
            "fallback",
            ops.quantize_fallback,
            {"block": _BLOCK, "criterion": "absmax", "colwise": "stochastic"},
            (x, theta[None], seeds),
            fallback,
            2 + fallback,
            4,  # scales of both layouts and of the residual, and the metric
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
        codes, scales = actual.residual
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
