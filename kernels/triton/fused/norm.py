"""RMS normalization, fused with the quantization of its output."""

from typing import Any

import jax
import triton
import triton.language as tl

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.fused_reference import NormQuantized
from fbq_jax.kernels.reference import Block
from fbq_jax.kernels.triton import quantize
from fbq_jax.kernels.triton.block_codes import accumulate_amax, widen
from fbq_jax.kernels.triton.block_quantize import quantize_with_fallback
from fbq_jax.kernels.triton.block_tiles import load, locate_block, part_at
from fbq_jax.kernels.triton.fused.launch_fused import can_fuse, launch_forward
from fbq_jax.kernels.triton.packed import store_packed

PART_ROWS = 32  # The fastest on an H200.


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    **options: Any,
) -> NormQuantized:
    """See ``fused_reference.rms_norm_quantize``.  XLA computes the mean squares."""
    if not can_fuse(x.shape, block):
        operands = x, norm_scale, theta, seeds
        return fused_reference.rms_norm_quantize(
            *operands, epsilon=epsilon, bits=bits, block=block, **options, ops=quantize
        )
    rstd = fused_reference.mean_square_rstd(x, epsilon)
    operand, (normalized,) = launch_forward(
        _rms_norm_quantize,
        x,
        norm_scale,
        rstd,
        theta,
        seeds=seeds,
        shape=x.shape,
        saved=1,
        bits=bits,
        part_rows=PART_ROWS,
        block=block,
        **options,
    )
    return NormQuantized(operand, normalized, rstd)


@triton.jit
def _rms_norm_quantize(
    x,
    norm_scale,
    rstd,
    theta,
    seeds,
    row_offsets,
    column_offset,
    rows,
    groups,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    plane_8,
    plane_4,
    plane_2,
    plane_1,
    normalized_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    CRITERION: tl.constexpr,
    COLWISE: tl.constexpr,
):
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    operands = x, norm_scale, rstd, groups
    normalized = (plane_8, plane_4, plane_2, plane_1), normalized_scales
    noise = seeds, row_offsets, column_offset
    rowwise = (codes, scales), (residual_codes, residual_scales)
    outputs = rowwise, metrics, (colwise_codes, colwise_scales)
    modes: tl.constexpr = ("nearest", COLWISE, CRITERION)
    at, offsets = locate_block(rows, groups * c, r, c)
    amax = 0.0
    for part in range(at[1] * PARTS, (at[1] + 1) * PARTS):
        here = part_at(at, part)
        y, saved = _normalize(operands, here, r // PARTS, c)
        store_packed(normalized, saved, here, groups, BITS)
        amax = accumulate_amax(amax, y)
    quantize_with_fallback(
        _values, operands, (), amax, theta, noise, outputs, at, offsets, shape, modes
    )


@triton.jit
def _values(operands, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the output, in the dtype of x."""
    return _normalize(operands, at, r, c)[0]


@triton.jit
def _normalize(operands, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the output, in the dtype of x, and of ``x * rstd``, in float32."""
    x, norm_scale, rstd, groups = operands
    batch, i, j, rows, _ = at
    tiles = load(x, at, r, c)
    # Loaded as vectors, so that the matrices keep the layout of x.
    column_scale = tl.load(norm_scale + (batch * groups + j) * c + tl.arange(0, c))
    y, normalized = (), ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4) + k
        row_rstd = tl.load(rstd + batch * rows + row, row < rows, 0.0)[:, None]
        wide = widen(tiles[k])
        y += ((wide * (row_rstd * column_scale[None, :])).to(tiles[k].dtype),)  # type: ignore[assignment]
        normalized += (wide * row_rstd,)  # type: ignore[assignment]
    return y, normalized
