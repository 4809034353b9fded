"""Vector-wise quantization: one scale per row (rowwise) or per column (colwise).

A scale depends on a whole row or column, so there are two passes over the operand.  The
first pass writes the maxima of each tile, which XLA reduces to scales.  The second pass
writes the codes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from fbq_jax.kernels import rounding
from fbq_jax.kernels.reference import NO_AMAX_REDUCE, AmaxReduce, Layouts
from fbq_jax.kernels.scales import scale_and_inverse
from fbq_jax.kernels.triton.block_codes import (
    elementwise_max,
    from_bits,
    magnitudes,
    multiply,
    round_codes,
    widen,
)
from fbq_jax.kernels.triton.block_tiles import (
    load,
    locate_block,
    store_colwise,
    store_rowwise,
)
from fbq_jax.kernels.triton.launch import launch_on_blocks
from fbq_jax.kernels.triton.outputs import (
    as_layouts,
    colwise_codes,
    output,
    rowwise_codes,
)

TILE = (64, 128)


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    bound: float = 127.0,
    per_tensor: bool = False,
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """See ``reference.quantize_vectors``."""
    scales = functools.partial(_scales, bound=bound, per_tensor=per_tensor)
    modes = {"ROWWISE": rowwise, "COLWISE": colwise}
    batch, rows, columns = x.shape
    down, across = triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1])
    row_maxima, column_maxima = launch_on_blocks(
        _find_maxima,
        x,
        block=TILE,
        outputs=[
            output((batch, across, rows), jnp.int32, wanted=rowwise),
            output((batch, down, columns), jnp.int32, wanted=colwise),
        ],
        **modes,
    )
    # The seeds are passed in place of inverses that the kernel does not read.
    row_scales, row_inverses = column_scales, column_inverses = seeds, seeds
    if rowwise is not None:
        row_scales, row_inverses = scales(row_maxima, amax_reduce.rowwise)
    if colwise is not None:
        column_scales, column_inverses = scales(column_maxima, amax_reduce.colwise)
    codes, column_codes = launch_on_blocks(
        _round_vectors,
        x,
        row_inverses,
        column_inverses,
        seeds,
        *(global_offset or rounding.no_offset(x.shape[1])),
        block=TILE,
        outputs=[rowwise_codes(x.shape, rowwise), colwise_codes(x.shape, colwise)],
        CLIPPED=bound > 127.0,
        **modes,
    )
    return as_layouts(x.shape, (codes, row_scales), (column_codes, column_scales))


@functools.partial(jax.jit, static_argnums=1, static_argnames=("bound", "per_tensor"))
def _scales(
    maxima: jax.Array,
    amax_reduce: Callable[[jax.Array], jax.Array],
    *,
    bound: float,
    per_tensor: bool,
) -> tuple[jax.Array, jax.Array]:
    """Scales ``[B, N, 1]`` and inverses ``[B, N]`` from the maxima of ``_find_maxima``.

    The maxima are int32 ``[B, T, N]``, where T counts tiles.
    """
    bits = jnp.max(maxima, axis=1)
    if per_tensor:
        bits = jnp.broadcast_to(jnp.max(bits, axis=1, keepdims=True), bits.shape)
    amax = amax_reduce(lax.bitcast_convert_type(bits, jnp.float32))
    scales, inverses = scale_and_inverse(amax, bound)
    return scales[:, :, None], inverses


@triton.jit
def _find_maxima(
    x,
    rows,
    columns,
    row_maxima,
    column_maxima,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
):
    """``max |x|`` of each row and each column of a tile, as the bits of a float32.

    As integers, the bits have the order of the floats, with NaN last.  XLA's maximum of
    floats may drop a NaN.
    """
    columns *= COLUMN_UNIT
    at, _ = locate_block(rows, columns, r, c)
    batch, i, j, _, _ = at
    tiles = load(x, at, r, c)
    bits = magnitudes(tiles)
    if ROWWISE is not None:
        row_maxima += (batch * tl.cdiv(columns, c) + j) * rows
        for k in tl.static_range(4):
            row = i * r + 4 * tl.arange(0, r // 4) + k
            top = from_bits(tl.max(bits[k].to(tl.int32), 1), tiles[0].dtype)
            tl.store(row_maxima + row, top.to(tl.int32, bitcast=True), row < rows)
    if COLWISE is not None:
        column_maxima += (batch * tl.cdiv(rows, r) + i) * columns
        column = j * c + tl.arange(0, c)
        top = tl.max(elementwise_max(bits).to(tl.int32), 0)
        top = from_bits(top, tiles[0].dtype)
        inside = column < columns
        tl.store(column_maxima + column, top.to(tl.int32, bitcast=True), inside)


@triton.jit
def _round_vectors(
    x,
    row_inverses,
    column_inverses,
    seeds,
    row_offsets,
    column_offset,
    rows,
    columns,
    codes,
    column_codes,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
    CLIPPED: tl.constexpr,
):
    noise = (seeds,), row_offsets, column_offset
    at, _ = locate_block(rows, columns * COLUMN_UNIT, r, c)
    tiles = load(x, at, r, c)
    if ROWWISE is not None:
        v = _multiply_rows(tiles, row_inverses, at)
        store_rowwise(codes, _round(v, noise, at, ROWWISE, CLIPPED), at)
    if COLWISE is not None:
        v = _multiply_columns(tiles, column_inverses, at)
        store_colwise(column_codes, _round(v, noise, at, COLWISE, CLIPPED), at)


@triton.jit
def _multiply_rows(tiles, inverses, at):
    """Tiles in units of the scales of their rows."""
    batch, i, _, rows, _ = at
    r: tl.constexpr = 4 * tiles[0].shape[0]
    inverses += batch * rows
    v = ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4)[:, None] + k
        inverse = tl.load(inverses + row, row < rows, 0.0)
        v += (widen(tiles[k]) * inverse,)
    return v


@triton.jit
def _multiply_columns(tiles, inverses, at):
    """Tiles in units of the scales of their columns."""
    batch, _, j, _, columns = at
    c: tl.constexpr = tiles[0].shape[1]
    inverses += batch * columns
    column = j * c + tl.arange(0, c)[None, :]
    return multiply(tiles, tl.load(inverses + column, column < columns, 0.0))


@triton.jit
def _round(v, noise, at, MODE: tl.constexpr, CLIPPED: tl.constexpr):
    if CLIPPED:
        v = [tl.maximum(tl.minimum(x, 127.0), -127.0) for x in v]
    return round_codes(v, noise, at, MODE)
