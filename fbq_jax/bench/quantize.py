"""Quantization by the bytes it has to move, beside a copy on the same device."""

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
    """One op to measure: its name, options and arguments, and what it stores a block.

    Attributes:
      layouts: numbers of INT8 codes stored for an element.
      per_block: float32 values stored for a block.
    """

    what: str
    op: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[jax.Array, ...]
    fallback: float | None
    layouts: float
    per_block: int


def rows(
    shapes: Sequence[tuple[int, ...]],
    rates: Sequence[float] = RATES,
    copy_shape: tuple[int, ...] = COPY_SHAPE,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures a copy, then for each shape plain and fallback quantization of bf16.

    The bytes counted are those that must move: the operand once, and the codes, scales
    and metrics that are stored, the residual's codes in the blocks that fell back.

    Raises:
      WrongResultError: if codes, scales or metrics differ from the definition's.
    """
    by = dispatch.choose("quantize", _BLOCK, implementation=implementation)
    copy = _copy(copy_shape, effort)
    yield copy
    for shape in shapes:
        for case in _cases(shape, rates, by.implementation):
            run, definition = (
                jax.jit(functools.partial(case.op, **case.options, implementation=name))
                for name in (by.implementation, "reference")
            )
            error = _differing(run(*case.args), definition(*case.args))
            what = f"{case.what} of {shape} by {by.implementation}"
            measure.require(error, 0.0, what)
            x = case.args[0]
            blocks = math.prod(-(-size // _SIDE) for size in shape)
            stored = case.layouts * x.size + case.per_block * blocks * _FLOAT32_BYTES
            yield row(
                measure.timing(run, *case.args, effort=effort),
                x.nbytes + stored,
                copy,
                what=case.what,
                implementation=by.implementation,
                shape=shape,
                fallback=case.fallback,
                errors={"differ": error},
            )


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
    options = {"block": _BLOCK, "criterion": "absmax", "colwise": "stochastic"}
    for rate in rates:
        theta = ascending[metric.size - 1 - round(rate * metric.size)]
        taken = float(jnp.mean(metric > theta, dtype=jnp.float32))
        yield _Case(
            "fallback",
            ops.quantize_fallback,
            options,
            (x, theta[None], seeds),
            taken,
            2 + taken,
            4,  # scales of both layouts and of the residual, and the metric
        )


def _copy(shape: tuple[int, ...], effort: Effort) -> Row:
    """The faster of a copy and an element-wise program on one large array."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    programs = {"copy": jax.jit(jnp.copy), "copy, x + 1": jax.jit(lambda x: x + 1)}
    for what, program in programs.items():
        if program(x).unsafe_buffer_pointer() == x.unsafe_buffer_pointer():
            raise measure.WrongResultError(f"{what} returned its argument's memory")
    copies = []
    for what, program in programs.items():
        timing = measure.timing(program, x, effort=effort)
        if timing.burst_of == "calls":
            # The profiler sees no kernel in a plain copy, which no power limit slows.
            timing = timing._replace(burst_ms=timing.ms)
        copies.append(
            row(timing, 2 * x.nbytes, what=what, implementation="xla", shape=shape)
        )
    return min(copies, key=lambda row: row.ms)


@jax.jit
def _share_differing(actual: Any, expected: Any) -> jax.Array:
    different = [
        jnp.sum(a != b, dtype=jnp.float32)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]
    return sum(different) / sum(a.size for a in jax.tree.leaves(actual))


def _differing(actual: Any, expected: Any) -> float:
    """The share of all values that differ; a residual's codes count where it is."""
    if isinstance(actual, FallbackQuantized):
        codes, scales = actual.residual
        _, rows, columns = codes.shape
        taken = jnp.repeat(jnp.repeat(scales > 0.0, _SIDE, axis=1), _SIDE, axis=2)
        codes = jnp.where(taken[:, :rows, :columns], codes, 0)
        actual = actual._replace(residual=actual.residual._replace(codes=codes))
    return float(_share_differing(actual, expected))
