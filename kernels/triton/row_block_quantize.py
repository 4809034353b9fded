"""Quantization of a block with one scale per row or per column, in a Triton program.

A row lies in one part of its block, so its codes are stored as soon as its part is
computed.  A column spans all parts, and so does the block: their codes need a second
visit.  The arguments of device functions are as in ``block_quantize``.
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
from fbq_jax.kernels.triton.block_tiles import part_at, store_colwise, store_rowwise
from fbq_jax.kernels.triton.packed import store_saved


@triton.jit
def quantize_row_block(
    SOURCE: tl.constexpr,
    operands,
    packed,
    noise,
    outputs,
    at,
    offsets,
    CONFIG: tl.constexpr,
):
    """Stores all that ``reference.quantize`` returns for a block."""
    if CONFIG.held:
        tiles, saved = SOURCE(operands, at, CONFIG.r, CONFIG)
        store_saved(packed, saved, at, CONFIG.bits)
        _quantize_held(tiles, noise, outputs, at, offsets, CONFIG)
    else:
        _quantize_parts(SOURCE, operands, packed, noise, outputs, at, offsets, CONFIG)


@triton.jit
def store_empty_rows(outputs, at, offsets, CONFIG: tl.constexpr):
    """Stores scales and sums of a block without rows: zeros."""
    r: tl.constexpr = CONFIG.r
    c: tl.constexpr = CONFIG.c
    ROWWISE: tl.constexpr = CONFIG.rowwise
    COLWISE: tl.constexpr = CONFIG.colwise
    _, row_scales, _ = outputs[0]
    _, column_scales, column_sums = outputs[2]
    if ROWWISE is not None:
        _store_row_scales(tl.zeros((r,), tl.float32), row_scales, at, c, ROWWISE)
    if CONFIG.colwise_in_blocks:
        tl.store(column_scales + offsets[1], 0.0)
    elif COLWISE is not None:
        _store_column_scales(tl.zeros((c,), tl.float32), column_scales, at, r, COLWISE)
    if CONFIG.column_sums:
        tl.store(column_sums + offsets[1], 0.0)


@triton.jit
def _quantize_held(tiles, noise, outputs, at, offsets, CONFIG: tl.constexpr):
    """Quantizes a block whose tiles registers hold."""
    ROWWISE: tl.constexpr = CONFIG.rowwise
    COLWISE: tl.constexpr = CONFIG.colwise
    codes, row_scales, _ = outputs[0]
    column_codes, column_scales, column_sums = outputs[2]
    if ROWWISE is not None or CONFIG.colwise_in_blocks:
        maxima = row_maxima(tiles)
    if ROWWISE is not None:
        row_inverses = _store_row_scales(maxima, row_scales, at, CONFIG.c, ROWWISE)
    if COLWISE is not None:
        if CONFIG.colwise_in_blocks:
            bits = tl.max(maxima.to(tl.int32, bitcast=True))
            amax = bits.to(tl.float32, bitcast=True)
            scale, inverse = scale_of_codes(amax, COLWISE)
            tl.store(column_scales + offsets[1], scale)
        else:
            maxima = column_maxima(tiles)
            inverse = _store_column_scales(maxima, column_scales, at, CONFIG.r, COLWISE)
    if ROWWISE == "stochastic" or COLWISE == "stochastic":
        row_keys, column_key = noise_keys(noise, at, CONFIG.r, CONFIG.c)
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
                rounded += (round_tile(v, drawn[n], ROWWISE).to(tl.int8),)  # type: ignore[assignment]
            if COLWISE is not None:
                v = widen(tiles[2 * k + n]) * inverse
                column_rounded += (round_tile(v, drawn[n], COLWISE),)  # type: ignore[assignment]
    if ROWWISE is not None and ROWWISE != "float8":
        store_rowwise(codes, rounded, at)
    if COLWISE is not None:
        if COLWISE == "float8":
            column_rounded = float8_words(column_rounded)
        store_colwise(column_codes, column_rounded, at)
        if CONFIG.column_sums:
            tl.store(column_sums + offsets[1], largest_column_sum(column_rounded))


@triton.jit
def _quantize_parts(
    SOURCE: tl.constexpr,
    operands,
    packed,
    noise,
    outputs,
    at,
    offsets,
    CONFIG: tl.constexpr,
):
    """Quantizes a block whose parts a program visits one after the other."""
    r: tl.constexpr = CONFIG.r // CONFIG.parts
    c: tl.constexpr = CONFIG.c
    ROWWISE: tl.constexpr = CONFIG.rowwise
    COLWISE: tl.constexpr = CONFIG.colwise
    codes, row_scales, _ = outputs[0]
    column_codes, column_scales, column_sums = outputs[2]
    i = at[1]
    amax = 0.0 if CONFIG.colwise_in_blocks else tl.zeros((c,), tl.float32)
    for part in range(i * CONFIG.parts, (i + 1) * CONFIG.parts):
        here = part_at(at, part)
        tiles, saved = SOURCE(operands, here, r, CONFIG)
        store_saved(packed, saved, here, CONFIG.bits)
        if ROWWISE is not None:
            maxima = row_maxima(tiles)
            inverses = _store_row_scales(maxima, row_scales, here, c, ROWWISE)
            _store_row_codes(codes, tiles, inverses, noise, here, ROWWISE)
        if CONFIG.colwise_in_blocks:
            amax = accumulate_amax(amax, tiles)
        elif COLWISE is not None:
            top = column_maxima(tiles)
            amax = tl.maximum(amax, top, propagate_nan=tl.PropagateNan.ALL)
    if COLWISE is not None:
        if CONFIG.colwise_in_blocks:
            scale, inverse = scale_of_codes(amax, COLWISE)
            tl.store(column_scales + offsets[1], scale)
        else:
            inverse = _store_column_scales(amax, column_scales, at, CONFIG.r, COLWISE)
        stored = codes, column_codes
        largest = 0.0
        for part in range(i * CONFIG.parts, (i + 1) * CONFIG.parts):
            here = part_at(at, part)
            v = multiply(SOURCE(operands, here, r, CONFIG)[0], inverse)
            largest += store_rounded(
                stored, v, noise, here, None, COLWISE, False, CONFIG.column_sums
            )[1]
        if CONFIG.column_sums:
            tl.store(column_sums + offsets[1], largest)


@triton.jit
def _store_row_codes(codes, tiles, inverses, noise, at, MODE: tl.constexpr):
    """Stores the codes of tiles whose rows have the inverses of their own scales."""
    v = ()
    for k in tl.static_range(4):
        v += (widen(tiles[k]) * inverses[k],)  # type: ignore[assignment]
    store_rounded((codes, codes), v, noise, at, MODE, None)


@triton.jit
def _store_row_scales(maxima, scales, at, c: tl.constexpr, MODE: tl.constexpr):
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
def _store_column_scales(maxima, scales, at, r: tl.constexpr, MODE: tl.constexpr):
    """Stores the scales of columns; returns their inverses."""
    batch, i, j, rows, columns = at
    c: tl.constexpr = maxima.shape[0]
    scales += (batch * tl.cdiv(rows, r) + i) * columns
    scale, inverse = scale_of_codes(maxima, MODE)
    column = j * c + tl.arange(0, c)
    tl.store(scales + column, scale, column < columns)
    return one_per_thread(inverse)[None, :]
