"""A norm or a gate, fused with the quantization of its output."""

from typing import Unpack

import jax
import triton
import triton.language as tl

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackOptions,
    FallbackQuantized,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton import quantize
from fbq_jax.kernels.triton.block_codes import accumulate_amax
from fbq_jax.kernels.triton.block_quantize import quantize_with_fallback, store_empty
from fbq_jax.kernels.triton.block_tiles import locate_block, part_at
from fbq_jax.kernels.triton.fused.layers import (
    gate_values,
    norm_values,
    normalize,
    silu_gate,
)
from fbq_jax.kernels.triton.fused.packed_arrays import (
    as_packed,
    can_fuse,
    packed_outputs,
)
from fbq_jax.kernels.triton.launch import launch, seed_arguments
from fbq_jax.kernels.triton.outputs import BlockOutputs, Shape, as_fallback
from fbq_jax.kernels.triton.packed import store_packed

# The rows of a part of a block: the fastest on an H200.
NORM_PART_ROWS = 32
GATE_PART_ROWS = 16


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    *,
    epsilon: float,
    bits: int,
    **options: Unpack[FallbackOptions],
) -> NormQuantized:
    """See ``fused_reference.rms_norm_quantize``.  XLA computes the mean squares."""
    if not can_fuse(x.shape, options["block"]):
        operands = x, norm_scale, theta, seeds
        return fused_reference.rms_norm_quantize(
            *operands, epsilon=epsilon, bits=bits, ops=quantize, **options
        )
    rstd = fused_reference.mean_square_rstd(x, epsilon)
    operand, normalized, _ = _launch_layer(
        x,
        norm_scale,
        rstd,
        theta,
        seeds,
        shape=x.shape,
        is_norm=True,
        bits=bits,
        **options,
    )
    return NormQuantized(operand, normalized, rstd)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    bits: int,
    interleaved: bool = True,
    **options: Unpack[FallbackOptions],
) -> GateQuantized:
    """See ``fused_reference.silu_gate_quantize``."""
    batch, rows, both = gate_up.shape
    shape = batch, rows, both // 2
    if not can_fuse(shape, options["block"]):
        return fused_reference.silu_gate_quantize(
            gate_up,
            theta,
            seeds,
            row_counts,
            bits=bits,
            interleaved=interleaved,
            ops=quantize,
            **options,
        )
    operand, gate_factor, up_factor = _launch_layer(
        gate_up,
        *(theta, theta),  # in place of arrays that only a norm reads
        theta,
        seeds,
        row_counts,
        shape=shape,
        is_norm=False,
        interleaved=interleaved,
        bits=bits,
        **options,
    )
    return GateQuantized(operand, gate_factor, up_factor)


def _launch_layer(
    x: jax.Array,
    norm_scale: jax.Array,
    rstd: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    shape: Shape,
    is_norm: bool,
    interleaved: bool = True,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
) -> tuple[FallbackQuantized, Packed, Packed]:
    """Returns the quantized output ``shape`` of a layer, and the arrays that it saves.

    A norm saves one array, and the second one is without elements.
    """
    seed_arrays, several = seed_arguments(seeds, colwise)
    out = BlockOutputs(shape, block)
    results = launch(
        _quantize_layer,
        x,
        norm_scale,
        rstd,
        theta,
        *seed_arrays,
        *(global_offset or no_offset(shape[1])),
        seed_arrays[0] if row_counts is None else row_counts,  # not read if None
        shape[1],
        out.blocks[1],
        outputs=[
            *out.fallback("nearest", criterion, colwise),
            *packed_outputs(shape, bits),
            *packed_outputs(shape, bits, wanted=not is_norm),
        ],
        grid=(out.programs,),
        r=block[0],
        c=block[1],
        PARTS=block[0] // (NORM_PART_ROWS if is_norm else GATE_PART_ROWS),
        SEVERAL_SEEDS=several,
        BITS=bits,
        CRITERION=criterion,
        COLWISE=colwise,
        IS_NORM=is_norm,
        GROUPED=row_counts is not None,
        INTERLEAVED=interleaved,
    )
    saved, second = as_packed(results[9:14]), as_packed(results[14:])
    return as_fallback(shape, results), saved, second


@triton.jit
def _quantize_layer(
    x,
    norm_scale,
    rstd,
    theta,
    seed,
    calls,
    not_earlier,
    stream,
    index,
    row_offsets,
    column_offset,
    row_counts,
    rows,
    groups,
    codes,
    scales,
    sums,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    colwise_sums,
    first_plane_8,
    first_plane_4,
    first_plane_2,
    first_plane_1,
    first_scales,
    second_plane_8,
    second_plane_4,
    second_plane_2,
    second_plane_1,
    second_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    SEVERAL_SEEDS: tl.constexpr,
    BITS: tl.constexpr,
    CRITERION: tl.constexpr,
    COLWISE: tl.constexpr,
    IS_NORM: tl.constexpr,
    GROUPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    COMPUTE: tl.constexpr = normalize if IS_NORM else silu_gate
    VALUES: tl.constexpr = norm_values if IS_NORM else gate_values
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    first = (first_plane_8, first_plane_4, first_plane_2, first_plane_1), first_scales
    second_planes = second_plane_8, second_plane_4, second_plane_2, second_plane_1
    packed = first, (second_planes, second_scales)
    seeds = (seed, calls, not_earlier, stream, index) if SEVERAL_SEEDS else (seed,)
    noise = seeds, row_offsets, column_offset
    rowwise = (codes, scales, sums), (residual_codes, residual_scales)
    outputs = rowwise, metrics, (colwise_codes, colwise_scales, colwise_sums)
    modes: tl.constexpr = ("nearest", COLWISE, CRITERION, False, False)
    at, offsets = locate_block(rows, groups * c, r, c)
    source = (x,)
    if GROUPED:
        row_count = tl.load(row_counts + at[0])
        if row_count == 0:
            store_empty(outputs, offsets, modes)
            return
        source = x, at[0] * rows, row_count  # type: ignore[assignment]
    spacing = (2, 1) if INTERLEAVED else (1, groups)
    operands = (x, norm_scale, rstd, groups) if IS_NORM else (source, spacing)
    amax = 0.0
    for part in range(at[1] * PARTS, (at[1] + 1) * PARTS):
        here = part_at(at, part)
        y, saved = COMPUTE(operands, here, r // PARTS, c)
        for k in tl.static_range(len(saved)):
            store_packed(packed[k], saved[k], here, groups, BITS)
        amax = accumulate_amax(amax, y)
    quantize_with_fallback(
        VALUES, operands, (), amax, theta, noise, outputs, at, offsets, shape, modes
    )
