"""Vector-wise quantization: one scale a row by rows, one a column by columns.

A scale depends on all of a row or a column, so there are two passes over the operand:
for the maxima of each tile, which XLA reduces to scales, and for the codes.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.reference import SEPARATE, AmaxReduce, Layouts, Quantized
from fbq_jax.kernels.scales import scale_and_inverse
from fbq_jax.kernels.triton.block_tiles import (
    from_bits,
    highest,
    in_column_scales,
    in_row_scales,
    load,
    magnitudes,
    nearest,
    position,
    stochastic,
    store_columns,
    store_rows,
)
from fbq_jax.kernels.triton.launch import launch

TILE = (64, 128)
NUM_WARPS = 4


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    bound: float = 127.0,
    per_tensor: bool = False,
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: AmaxReduce = SEPARATE,
) -> Layouts:
    """See ``reference.quantize_vectors``."""
    if x.size == 0:
        # No kernel starts for nothing.
        return reference.quantize_vectors(
            x,
            seeds,
            rowwise=rowwise,
            colwise=colwise,
            bound=bound,
            per_tensor=per_tensor,
            amax_reduce=amax_reduce,
        )
    batch, height, width = x.shape
    down, across = -(-height // TILE[0]), -(-width // TILE[1])
    unit = math.gcd(width, 16)
    run = functools.partial(
        launch,
        grid=(batch * down * across,),
        num_warps=NUM_WARPS,
        num_stages=1,
        r=TILE[0],
        c=TILE[1],
        COLUMN_UNIT=unit,
        ROWS=rowwise,
        COLUMNS=colwise,
    )

    def output(wanted: object, *shape: int, dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((0,) if wanted is None else shape, dtype)

    row_tops, column_tops = run(
        _maxima,
        x,
        height,
        width // unit,
        outputs=[
            output(rowwise, batch, across, height, dtype=jnp.int32),
            output(colwise, batch, down, width, dtype=jnp.int32),
        ],
    )
    scales = functools.partial(_scales, bound=bound, per_tensor=per_tensor)
    # The seeds stand for pointers that are not read.
    row_scales, row_inverses = (
        (None, seeds) if rowwise is None else scales(row_tops, amax_reduce.rowwise)
    )
    column_scales, column_inverses = (
        (None, seeds) if colwise is None else scales(column_tops, amax_reduce.colwise)
    )
    # Columns of codes are padded to 16 bytes, what a thread stores at once.
    padded = -(-height // 16) * 16
    codes, column_codes = run(
        _codes,
        x,
        row_inverses,
        column_inverses,
        seeds,
        *(global_offset or rounding.whole(height)),
        height,
        width // unit,
        outputs=[
            output(rowwise, batch, height, width, dtype=jnp.int8),
            output(colwise, batch, width, padded, dtype=jnp.int8),
        ],
        CLIPPED=bound > 127.0,
    )
    return Layouts(
        None if row_scales is None else Quantized(codes, row_scales),
        None
        if column_scales is None
        else Quantized(column_codes[..., :height], column_scales),
    )


@functools.partial(jax.jit, static_argnums=1, static_argnames=("bound", "per_tensor"))
def _scales(
    tops: jax.Array,
    amax_reduce: Callable[[jax.Array], jax.Array],
    *,
    bound: float,
    per_tensor: bool,
) -> tuple[jax.Array, jax.Array]:
    """From maxima of tiles ``[B, T, N]``, the scales ``[B, N, 1]`` and reciprocals."""
    top = jnp.max(tops, axis=1)
    if per_tensor:
        top = jnp.broadcast_to(jnp.max(top, axis=1, keepdims=True), top.shape)
    amax = amax_reduce(lax.bitcast_convert_type(top, jnp.float32))
    scales, inverses = scale_and_inverse(amax, bound)
    return scales[:, :, None], inverses


@triton.jit
def _maxima(
    x,
    rows,
    columns,
    row_tops,
    column_tops,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``max |x|`` of each row and each column of a tile, as the bits of a float32.

    Bits, which are ordered as the floats with NaN last, because XLA's maximum of floats
    may lose a NaN.
    """
    columns *= COLUMN_UNIT
    batch, i, j, _, _ = position(rows, columns, r, c)
    bits = magnitudes(load(x, batch, i, j, rows, columns, r, c))
    if ROWS is not None:
        row_tops += (batch * tl.cdiv(columns, c) + j) * rows
        for k in tl.static_range(4):
            row = i * r + 4 * tl.arange(0, r // 4) + k
            top = from_bits(tl.max(bits[k].to(tl.int32), 1), x.dtype.element_ty)
            tl.store(row_tops + row, top.to(tl.int32, bitcast=True), row < rows)
    if COLUMNS is not None:
        column_tops += (batch * tl.cdiv(rows, r) + i) * columns
        column = j * c + tl.arange(0, c)
        top = from_bits(tl.max(highest(bits).to(tl.int32), 0), x.dtype.element_ty)
        inside = column < columns
        tl.store(column_tops + column, top.to(tl.int32, bitcast=True), inside)


@triton.jit
def _codes(
    x,
    row_inverses,
    column_inverses,
    seeds,
    origin_rows,
    origin_column,
    rows,
    columns,
    codes,
    column_codes,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLIPPED: tl.constexpr,
):
    noise = seeds, origin_rows, origin_column
    columns *= COLUMN_UNIT
    batch, i, j, _, _ = position(rows, columns, r, c)
    tiles = load(x, batch, i, j, rows, columns, r, c)
    if ROWS is not None:
        v = in_row_scales(tiles, row_inverses + batch * rows, i, rows)
        rounded = _round(v, noise, batch, i, j, rows, ROWS, CLIPPED)
        store_rows(codes, rounded, batch, i, j, rows, columns)
    if COLUMNS is not None:
        v = in_column_scales(tiles, column_inverses + batch * columns, j, columns)
        rounded = _round(v, noise, batch, i, j, rows, COLUMNS, CLIPPED)
        store_columns(column_codes, rounded, batch, i, j, rows, columns)


@triton.jit
def _round(v, noise, batch, i, j, rows, MODE: tl.constexpr, CLIPPED: tl.constexpr):
    if CLIPPED:
        v = [tl.maximum(tl.minimum(x, 127.0), -127.0) for x in v]
    if MODE == "nearest":
        return nearest(v)
    return stochastic(v, noise, batch, i, j, rows)
