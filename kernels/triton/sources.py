"""The quantizing kernels: one for each source of ``fbq_jax.kernels.sources``.

One program computes and quantizes one block.  The rest of the device code is in
``block_quantize``, for one scale per block, and in ``row_block_quantize``.
"""

import math

import triton
import triton.language as tl

from fbq_jax.kernels.triton.block_codes import widen
from fbq_jax.kernels.triton.block_quantize import quantize_block, store_empty
from fbq_jax.kernels.triton.block_tiles import load, locate_block
from fbq_jax.kernels.triton.packed import load_packed
from fbq_jax.kernels.triton.row_block_quantize import (
    quantize_row_block,
    store_empty_rows,
)

LOG2_E = tl.constexpr(math.log2(math.e))
# Without the instructions for subnormal numbers, which do not change 1 + 2**x, nor the
# root of a number from 1 on.
EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
RSQRT = tl.constexpr("rsqrt.approx.ftz.f32 $0, $1;")


@triton.jit
def quantize_matrix(
    x,
    first_rows,
    row_counts,
    theta,
    seeds,
    calls,
    places,
    global_offset,
    rows,
    units,
    codes,
    scales,
    sums,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    colwise_sums,
    CONFIG: tl.constexpr,
):
    """Quantizes a block of a matrix, or of a tile of rows."""
    at, offsets = locate_block(rows, units * CONFIG.column_unit, CONFIG.r, CONFIG.c)
    main = codes, scales, sums
    residual = residual_codes, residual_scales, metrics
    outputs = main, residual, (colwise_codes, colwise_scales, colwise_sums)
    source = (x,)
    if CONFIG.is_grouped:
        row_count = tl.load(row_counts + at[0])
        if row_count == 0:
            _store_empty(outputs, at, offsets, CONFIG)
            return
        # A pointer to the first row takes fewer registers than its number.
        first_row = tl.load(first_rows + at[0]).to(tl.int64)
        source = x + first_row * at[4], 0, row_count  # type: ignore[assignment]
    noise = (seeds, calls, places) if CONFIG.folds_seeds else (seeds,), global_offset
    _quantize(_matrix, source, (), theta, noise, outputs, at, offsets, CONFIG)


@triton.jit
def quantize_norm(
    x,
    norm_scale,
    rstd,
    theta,
    seeds,
    calls,
    places,
    global_offset,
    rows,
    units,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    packed,
    packed_scales,
    CONFIG: tl.constexpr,
):
    """Quantizes a block of an RMS norm."""
    at, offsets = locate_block(rows, units * CONFIG.column_unit, CONFIG.r, CONFIG.c)
    residual = residual_codes, residual_scales, metrics
    outputs = (codes, scales, ()), residual, (colwise_codes, colwise_scales, ())
    operands = x, norm_scale, rstd, units
    saved = packed, packed_scales, units
    noise = (seeds, calls, places) if CONFIG.folds_seeds else (seeds,), global_offset
    _quantize(_norm, operands, saved, theta, noise, outputs, at, offsets, CONFIG)


@triton.jit
def quantize_gate(
    x,
    row_counts,
    theta,
    seeds,
    calls,
    places,
    global_offset,
    rows,
    units,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    packed,
    packed_scales,
    CONFIG: tl.constexpr,
):
    """Quantizes a block of a gate's output; x holds gate and up."""
    at, offsets = locate_block(rows, units * CONFIG.column_unit, CONFIG.r, CONFIG.c)
    residual = residual_codes, residual_scales, metrics
    outputs = (codes, scales, ()), residual, (colwise_codes, colwise_scales, ())
    source = (x,)
    if CONFIG.is_grouped:
        row_count = tl.load(row_counts + at[0])
        if row_count == 0:
            _store_empty(outputs, at, offsets, CONFIG)
            return
        source = x, at[0] * rows, row_count  # type: ignore[assignment]
    operands, saved = (source, units), (packed, packed_scales, units)
    noise = (seeds, calls, places) if CONFIG.folds_seeds else (seeds,), global_offset
    _quantize(_gate, operands, saved, theta, noise, outputs, at, offsets, CONFIG)


@triton.jit
def quantize_gate_grad(
    x,
    packed,
    packed_scales,
    row_counts,
    seeds,
    calls,
    places,
    global_offset,
    rows,
    units,
    codes,
    scales,
    sums,
    colwise_codes,
    colwise_scales,
    colwise_sums,
    CONFIG: tl.constexpr,
):
    """Quantizes a block of the gradient of gate or up; x is dy."""
    at, offsets = locate_block(rows, units * CONFIG.column_unit, CONFIG.r, CONFIG.c)
    colwise = colwise_codes, colwise_scales, colwise_sums
    outputs = (codes, scales, sums), (), colwise
    source = (x,)
    if CONFIG.is_grouped:
        row_count = tl.load(row_counts + at[0])
        if row_count == 0:
            _store_empty(outputs, at, offsets, CONFIG)
            return
        source = x, at[0] * rows, row_count  # type: ignore[assignment]
    operands = source, (packed, packed_scales, units)
    noise = (seeds, calls, places) if CONFIG.folds_seeds else (seeds,), global_offset
    _quantize(_gate_grad, operands, (), (), noise, outputs, at, offsets, CONFIG)


@triton.jit
def _quantize(
    SOURCE: tl.constexpr,
    operands,
    packed,
    theta,
    noise,
    outputs,
    at,
    offsets,
    CONFIG: tl.constexpr,
):
    """Quantizes a block; the arguments are as in ``block_quantize``."""
    if CONFIG.in_rows:
        quantize_row_block(
            SOURCE, operands, packed, noise, outputs, at, offsets, CONFIG
        )
    else:
        quantize_block(
            SOURCE, operands, packed, theta, noise, outputs, at, offsets, CONFIG
        )


@triton.jit
def _store_empty(outputs, at, offsets, CONFIG: tl.constexpr):
    """Stores what belongs to a block without rows."""
    if CONFIG.in_rows:
        store_empty_rows(outputs, at, offsets, CONFIG)
    else:
        store_empty(outputs, offsets, CONFIG)


@triton.jit
def _matrix(operands, at, r: tl.constexpr, CONFIG: tl.constexpr):
    """The tiles of a matrix; ``operands`` are the source that ``load`` takes."""
    return load(operands, at, r, CONFIG.c), ()


@triton.jit
def _norm(operands, at, r: tl.constexpr, CONFIG: tl.constexpr):
    """The tiles of the output, in the dtype of x, and of ``x * rstd``, in float32.

    ``operands`` are x, the scale and ``rstd`` of the norm, and the number of blocks in
    a row.
    """
    x, norm_scale, rstd, groups = operands
    batch, i, j, rows, _ = at
    c: tl.constexpr = CONFIG.c
    tiles = load((x,), at, r, c)
    # Loaded as vectors, so that the matrices keep the layout of x.
    column_scale = tl.load(norm_scale + (batch * groups + j) * c + tl.arange(0, c))
    y, normalized = (), ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4) + k
        row_rstd = tl.load(rstd + batch * rows + row, row < rows, 0.0)[:, None]
        wide = widen(tiles[k])
        y += ((wide * (row_rstd * column_scale[None, :])).to(tiles[k].dtype),)  # type: ignore[assignment]
        normalized += (wide * row_rstd,)  # type: ignore[assignment]
    return y, (normalized,)


@triton.jit
def _gate(operands, at, r: tl.constexpr, CONFIG: tl.constexpr):
    """The tiles of the output and, in float32, of the factors of both gradients.

    ``operands`` are the source of gate and up, which ``load`` takes, and the number of
    blocks in a row of either.
    """
    source, groups = operands
    batch, i, j, rows, columns = at
    gate_at, up_at = (2 * j, 2 * j + 1) if CONFIG.interleaved else (j, j + groups)
    gates = load(source, (batch, i, gate_at, rows, 2 * columns), r, CONFIG.c)
    ups = load(source, (batch, i, up_at, rows, 2 * columns), r, CONFIG.c)
    y, gate_factor, up_factor = (), (), ()
    for k in tl.static_range(4):
        gate, up = widen(gates[k]), widen(ups[k])
        # A power of two and the square of a reciprocal root: one instruction each.
        root = _approximate(RSQRT, 1.0 + _approximate(EXP2, gate * -LOG2_E))
        sigmoid = root * root
        silu = gate * sigmoid
        y += ((silu * up).to(gates[k].dtype),)  # type: ignore[assignment]
        gate_factor += (up * (sigmoid + silu * (1.0 - sigmoid)),)  # type: ignore[assignment]
        up_factor += (silu,)  # type: ignore[assignment]
    return y, (gate_factor, up_factor)


@triton.jit
def _gate_grad(operands, at, r: tl.constexpr, CONFIG: tl.constexpr):
    """The tiles of dy times a packed factor, in the dtype of dy.

    ``operands`` are the source of dy, which ``load`` takes, and the packed factors of
    gate and up, one after the other in each matrix of the stack.
    """
    source, factors = operands
    batch, i, column, rows, columns = at
    # Neighbouring programs of an interleaved gradient share a block of dy.
    if CONFIG.interleaved:
        j, is_up = column // 2, column % 2
    else:
        j, is_up = column % factors[2], (column >= factors[2]).to(tl.int32)
    tiles = load(source, (batch, i, j, rows, factors[2] * CONFIG.c), r, CONFIG.c)
    here = 2 * batch + is_up, i, j, rows, columns
    factor = load_packed(factors, here, r, CONFIG.bits)
    y = ()
    for k in tl.static_range(4):
        y += ((widen(tiles[k]) * factor[k]).to(tiles[k].dtype),)  # type: ignore[assignment]
    return y, ()


@triton.jit
def _approximate(INSTRUCTION: tl.constexpr, x):
    """One instruction for each element."""
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
