"""Quantization of one block with one scale per row or per column, in a Triton program.

Registers hold the block, or a kernel visits its parts (``block_quantize``) one after
the other.  A row lies in one part, so its codes are stored as soon as its part is
computed.  A column spans all parts, and so does the block: their codes need a second
visit.
"""

import triton
import triton.language as tl

from fbq_jax.kernels.triton.block_codes import (
    accumulate_amax,
    float8_words,
    largest_column_sum,
    multiply,
    noise_keys,
    noise_of_pair,
    round_tile,
    scale_of_codes,
    widen,
)
from fbq_jax.kernels.triton.block_maxima import (
    column_maxima,
    one_per_thread,
    row_maxima,
)
from fbq_jax.kernels.triton.block_quantize import store_rounded
from fbq_jax.kernels.triton.block_tiles import (
    part_at,
    store_colwise,
    store_rowwise,
)
from fbq_jax.kernels.triton.packed import store_packed


@triton.jit
def quantize_row_block(
    tiles,
    noise,
    outputs,
    at,
    offset,
    modes,
):
    """``quantize_row_block_parts`` for a block whose tiles registers hold.

    It packs nothing.
    """
    r: tl.constexpr = 4 * tiles[0].shape[0]
    c: tl.constexpr = tiles[0].shape[1]
    ROWWISE: tl.constexpr = modes[0]
    COLWISE: tl.constexpr = modes[1]
    COLUMN_BLOCKS: tl.constexpr = modes[2]
    codes, row_scales = outputs[0][0], outputs[0][1]
    column_codes, column_scales, column_sums = outputs[1]
    if ROWWISE is not None or COLUMN_BLOCKS:
        maxima = row_maxima(tiles)
    if ROWWISE is not None:
        row_inverses = store_row_scales(maxima, row_scales, at, c, ROWWISE)
    if COLWISE is not None:
        if COLUMN_BLOCKS:
            bits = tl.max(maxima.to(tl.int32, bitcast=True))
            amax = bits.to(tl.float32, bitcast=True)
            scale, inverse = scale_of_codes(amax, COLWISE)
            tl.store(column_scales + offset, scale)
        else:
            maxima = column_maxima(tiles)
            inverse = store_column_scales(maxima, column_scales, at, r, COLWISE)
    if ROWWISE == "stochastic" or COLWISE == "stochastic":
        row_keys, column_key = noise_keys(noise, at, r, c)
        keys = row_keys, one_per_thread(column_key)
    if ROWWISE == "float8":
        _store_row_codes(codes, tiles, row_inverses, noise, at, ROWWISE)
    # Both layouts add the same noise.  Two tiles at a time need fewer registers.
    rounded, column_rounded = (), ()
    for k in tl.static_range(2):
        drawn = None, None
        if ROWWISE == "stochastic" or COLWISE == "stochastic":
            drawn = noise_of_pair(keys, k)
        for n in tl.static_range(2):
            if ROWWISE is not None and ROWWISE != "float8":
                v = widen(tiles[2 * k + n]) * row_inverses[2 * k + n]
                rounded += (round_tile(v, drawn[n], ROWWISE).to(tl.int8),)
            if COLWISE is not None:
                v = widen(tiles[2 * k + n]) * inverse
                column_rounded += (round_tile(v, drawn[n], COLWISE),)
    if ROWWISE is not None and ROWWISE != "float8":
        store_rowwise(codes, rounded, at)
    if COLWISE is not None:
        if COLWISE == "float8":
            column_rounded = float8_words(column_rounded)
        store_colwise(column_codes, column_rounded, at)
        if modes[3]:
            largest = largest_column_sum(column_rounded)
            tl.store(column_sums + offset, largest)


@triton.jit
def quantize_row_block_parts(
    COMPUTE: tl.constexpr, operands, packed, noise, outputs, at, offset, shape, modes
):
    """Stores what ``reference.quantize_row_blocks`` returns for one block.

    Args:
      COMPUTE: ``COMPUTE(operands, at, r, c)`` is a device function that returns the
        tiles of one part, and a tuple of tiles to pack.
      operands: its operands.
      packed: where the latter are stored, as for ``store_packed``.
      noise: as for ``block_codes.noise_keys``.
      outputs: codes, scales and sums of each layout.
      at: the block.
      offset: of a colwise scale per block, and of sums.
      shape: the number of parts, and the shape of a part.
      modes: ``(rowwise, colwise, column_blocks, column_sums, bits)``: the mode of each
        layout; whether colwise codes have one scale per block, and sums; and the bits
        of packed codes.
    """
    PARTS: tl.constexpr = shape[0]
    r: tl.constexpr = shape[1]
    c: tl.constexpr = shape[2]
    ROWWISE: tl.constexpr = modes[0]
    COLWISE: tl.constexpr = modes[1]
    COLUMN_BLOCKS: tl.constexpr = modes[2]
    codes, row_scales, _ = outputs[0]
    column_codes, column_scales, column_sums = outputs[1]
    _, i, _, _, columns = at
    stored = codes, column_codes
    amax = 0.0 if COLUMN_BLOCKS else tl.zeros((c,), tl.float32)
    for part in range(i * PARTS, (i + 1) * PARTS):
        here = part_at(at, part)
        tiles, saved = COMPUTE(operands, here, r, c)
        for k in tl.static_range(len(saved)):
            store_packed(packed[k], saved[k], here, columns // c, modes[4])
        if ROWWISE is not None:
            inverses = store_row_scales(row_maxima(tiles), row_scales, here, c, ROWWISE)
            _store_row_codes(codes, tiles, inverses, noise, here, ROWWISE)
        if COLUMN_BLOCKS:
            amax = accumulate_amax(amax, tiles)
        elif COLWISE is not None:
            top = column_maxima(tiles)
            amax = tl.maximum(amax, top, propagate_nan=tl.PropagateNan.ALL)
    if COLWISE is not None:
        if COLUMN_BLOCKS:
            scale, inverse = scale_of_codes(amax, COLWISE)
            tl.store(column_scales + offset, scale)
        else:
            inverse = store_column_scales(amax, column_scales, at, r * PARTS, COLWISE)
        colwise: tl.constexpr = (None, COLWISE, None, False, modes[3])
        largest = 0.0
        for part in range(i * PARTS, (i + 1) * PARTS):
            here = part_at(at, part)
            tiles = COMPUTE(operands, here, r, c)[0]
            v = multiply(tiles, inverse)
            largest += store_rounded(stored, v, noise, here, colwise)[1]
        if modes[3]:
            tl.store(column_sums + offset, largest)


@triton.jit
def _store_row_codes(codes, tiles, inverses, noise, at, MODE: tl.constexpr):
    """Stores the codes of tiles whose rows have the inverses of their own scales."""
    v = ()
    for k in tl.static_range(4):
        v += (widen(tiles[k]) * inverses[k],)  # type: ignore[assignment]
    store_rounded((codes, codes), v, noise, at, (MODE, None, None, False, False))


@triton.jit
def store_row_scales(maxima, scales, at, c: tl.constexpr, MODE: tl.constexpr):
    """Stores the scales of rows; returns their inverses for each tile."""
    batch, i, j, rows, columns = at
    r: tl.constexpr = maxima.shape[0]
    scales += (batch * tl.cdiv(columns, c) + j) * rows
    scale, inverse = scale_of_codes(maxima, MODE)
    row = i * r + tl.arange(0, r)
    tl.store(scales + row, scale, row < rows)
    even, odd = tl.split(tl.reshape(one_per_thread(inverse), (r // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return [x[:, None] for x in (first, second, third, fourth)]


@triton.jit
def store_column_scales(maxima, scales, at, r: tl.constexpr, MODE: tl.constexpr):
    """Stores the scales of columns; returns their inverses."""
    batch, i, j, rows, columns = at
    c: tl.constexpr = maxima.shape[0]
    scales += (batch * tl.cdiv(rows, r) + i) * columns
    scale, inverse = scale_of_codes(maxima, MODE)
    column = j * c + tl.arange(0, c)
    tl.store(scales + column, scale, column < columns)
    return one_per_thread(inverse)[None, :]
