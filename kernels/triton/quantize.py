"""Quantization, with fallback and transposition, in one pass over the operand.

One program quantizes one block; ``tiles`` has what it does there.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import rounding
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.triton.launch import launch
from fbq_jax.kernels.triton.tiles import (
    find_amax,
    in_scale,
    load,
    metric_of,
    nearest,
    position,
    residual_of,
    scale_of,
    stochastic,
    store_columns,
    store_rows,
)


def config(block: Block) -> tuple[int, int]:
    """The warps of a program and the stages of its pipeline."""
    return max(1, min(16, block[0] * block[1] // 2048)), 1


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rows: rounding.Rounding | None,
    columns: rounding.Rounding | None,
) -> Layouts:
    """See ``reference.quantize``."""
    operand = _Operand(x, block)
    num_warps, num_stages = config(block)
    codes, scales, column_codes, column_scales = launch(
        _quantize,
        x,
        seeds,
        *operand.sizes,
        outputs=[
            *operand.by_rows(wanted=rows is not None),
            *operand.by_columns(wanted=columns is not None),
        ],
        grid=operand.grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **operand.constants,
        ROWS=rows,
        COLUMNS=columns,
    )
    return Layouts(
        None if rows is None else Quantized(codes, scales),
        None if columns is None else operand.columns(column_codes, column_scales),
    )


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    columns: rounding.Rounding | None,
) -> FallbackQuantized:
    """See ``reference.quantize_fallback``."""
    operand = _Operand(x, block)
    num_warps, num_stages = config(block)
    codes, scales, residual, residual_scales, metric, *by_columns = launch(
        _quantize_fallback,
        x,
        theta,
        seeds,
        *operand.sizes,
        outputs=[
            *operand.by_rows(wanted=True),
            *operand.by_rows(wanted=True),
            operand.by_rows(wanted=True)[1],
            *operand.by_columns(wanted=columns is not None),
        ],
        grid=operand.grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **operand.constants,
        CRITERION=criterion,
        COLUMNS=columns,
    )
    return FallbackQuantized(
        Quantized(codes, scales),
        Quantized(residual, residual_scales),
        metric,
        None if columns is None else operand.columns(*by_columns),
    )


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """See ``reference.block_metric``."""
    operand = _Operand(x, block)
    num_warps, num_stages = config(block)
    (metric,) = launch(
        _block_metric,
        x,
        *operand.sizes,
        outputs=[operand.by_rows(wanted=True)[1]],
        grid=operand.grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **operand.constants,
        CRITERION=criterion,
    )
    return metric


class _Operand:
    """What a launch needs to know of an operand."""

    def __init__(self, x: jax.Array, block: Block) -> None:
        self.batch, self.rows, self.width = x.shape
        unit = math.gcd(self.width, 16)
        self.sizes = self.rows, self.width // unit
        self.blocks = -(-self.rows // block[0]), -(-self.width // block[1])
        self.grid = (self.batch * self.blocks[0] * self.blocks[1],)
        self.constants = {"r": block[0], "c": block[1], "COLUMN_UNIT": unit}

    def by_rows(self, *, wanted: bool) -> list[jax.ShapeDtypeStruct]:
        shape = (self.batch, self.rows, self.width) if wanted else (0,)
        return [
            jax.ShapeDtypeStruct(shape, jnp.int8),
            jax.ShapeDtypeStruct((self.batch, *self.blocks), jnp.float32),
        ]

    def by_columns(self, *, wanted: bool) -> list[jax.ShapeDtypeStruct]:
        """Each column of codes is padded to 16 bytes, what a thread stores at once."""
        shape = (self.batch, self.width, -(-self.rows // 16) * 16) if wanted else (0,)
        return [
            jax.ShapeDtypeStruct(shape, jnp.int8),
            jax.ShapeDtypeStruct((self.batch, *self.blocks[::-1]), jnp.float32),
        ]

    def columns(self, codes: jax.Array, scales: jax.Array) -> Quantized:
        return Quantized(codes[..., : self.rows], scales)


@triton.jit
def _quantize(
    x,
    seeds,
    rows,
    columns,
    codes,
    scales,
    column_codes,
    column_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns *= COLUMN_UNIT
    batch, i, j, at, at_column = position(rows, columns, r, c)
    tiles = load(x, batch, i, j, rows, columns, r, c)
    amax = find_amax(tiles)
    finite = amax < float("inf")
    scale, inverse = scale_of(amax)
    tl.store(scales + at, scale)
    tl.store(column_scales + at_column, scale)
    v = in_scale(tiles, inverse)
    if ROWS == "nearest" or COLUMNS == "nearest":
        rounded = nearest(v)
        if ROWS == "nearest":
            store_rows(codes, rounded, finite, batch, i, j, rows, columns)
        if COLUMNS == "nearest":
            store_columns(column_codes, rounded, finite, batch, i, j, rows, columns)
    if ROWS == "stochastic" or COLUMNS == "stochastic":
        rounded = stochastic(v, tl.load(seeds + batch), i, j)
        if ROWS == "stochastic":
            store_rows(codes, rounded, finite, batch, i, j, rows, columns)
        if COLUMNS == "stochastic":
            store_columns(column_codes, rounded, finite, batch, i, j, rows, columns)


@triton.jit
def _quantize_fallback(
    x,
    theta,
    seeds,
    rows,
    columns,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metric,
    column_codes,
    column_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    CRITERION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns *= COLUMN_UNIT
    batch, i, j, at, at_column = position(rows, columns, r, c)
    tiles = load(x, batch, i, j, rows, columns, r, c)
    amax = find_amax(tiles)
    finite = amax < float("inf")
    scale, inverse = scale_of(amax)
    tl.store(scales + at, scale)
    tl.store(column_scales + at_column, scale)
    v = in_scale(tiles, inverse)
    rounded = nearest(v)
    store_rows(codes, rounded, finite, batch, i, j, rows, columns)
    if COLUMNS == "nearest":
        store_columns(column_codes, rounded, finite, batch, i, j, rows, columns)
    if COLUMNS == "stochastic":
        noisy = stochastic(v, tl.load(seeds + batch), i, j)
        store_columns(column_codes, noisy, finite, batch, i, j, rows, columns)
    value = metric_of(tiles, rounded, amax, scale, CRITERION)
    tl.store(metric + at, value)
    residual_scale = 0.0
    # The second condition is false for an amax so large that scale * 127 overflows.
    if (value > tl.load(theta + batch)) & (scale * 127.0 < float("inf")):
        # Loaded again, from a cache: registers kept until here would cost every block.
        tiles = load(x, batch, i, j, rows, columns, r, c)
        rounded = nearest(in_scale(tiles, inverse))
        residual = residual_of(tiles, rounded, scale)
        residual_scale, inverse = scale_of(find_amax(residual))
        rounded = nearest(in_scale(residual, inverse))
        store_rows(residual_codes, rounded, True, batch, i, j, rows, columns)
    tl.store(residual_scales + at, residual_scale)


@triton.jit
def _block_metric(
    x,
    rows,
    columns,
    metric,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    CRITERION: tl.constexpr,
):
    columns *= COLUMN_UNIT
    batch, i, j, at, _ = position(rows, columns, r, c)
    tiles = load(x, batch, i, j, rows, columns, r, c)
    amax = find_amax(tiles)
    scale, inverse = scale_of(amax)
    rounded = nearest(in_scale(tiles, inverse))
    tl.store(metric + at, metric_of(tiles, rounded, amax, scale, CRITERION))
