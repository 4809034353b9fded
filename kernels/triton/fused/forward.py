"""A norm or a gate, fused with the quantization of its output."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    Criterion,
    FallbackOptions,
    FallbackQuantized,
    Layouts,
    RowBlockOptions,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton import quantize, quantize_row_blocks
from fbq_jax.kernels.triton.block_codes import accumulate_amax, find_amax
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
from fbq_jax.kernels.triton.launch import launch, mode_of, seed_arguments
from fbq_jax.kernels.triton.outputs import (
    BlockOutputs,
    RowBlockOutputs,
    Shape,
    as_fallback,
    output,
)
from fbq_jax.kernels.triton.packed import pack, store_chunks
from fbq_jax.kernels.triton.row_block_quantize import (
    quantize_row_block,
    quantize_row_block_parts,
)

# The rows of a part of a block, the fastest on an H200.
PART_ROWS = 32
# A gate holds blocks of up to this many values, and a warp this many of them, with one
# scale per block and per row: the fastest on an H100.  A norm is faster in parts.
HELD_VALUES = 2**14
VALUES_OF_A_WARP, ROW_BLOCK_VALUES_OF_A_WARP = 2**10, 2**11

# Four operands of ``_quantize_layer``: x, norm_scale, rstd and theta.
_Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


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
    operand, normalized, _ = _quantize_with_fallback(
        (x, norm_scale, rstd, theta),
        seeds,
        shape=x.shape,
        is_norm=True,
        bits=bits,
        **options,
    )
    return NormQuantized(operand, normalized, rstd)


def rms_norm_quantize_row_blocks(
    x: jax.Array,
    norm_scale: jax.Array,
    seeds: Seeds,
    *,
    epsilon: float,
    bits: int,
    **options: Unpack[RowBlockOptions],
) -> NormQuantized:
    """See ``fused_reference.rms_norm_quantize_row_blocks``."""
    if not can_fuse(x.shape, options["block"]):
        return fused_reference.rms_norm_quantize_row_blocks(
            x,
            norm_scale,
            seeds,
            epsilon=epsilon,
            bits=bits,
            ops=quantize_row_blocks,
            **options,
        )
    rstd = fused_reference.mean_square_rstd(x, epsilon)
    # The kernel reads no threshold.
    operand, normalized, _ = _quantize_row_blocks(
        (x, norm_scale, rstd, rstd),
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
    # A gate has no other operands than gate_up and the thresholds.
    operand, gate_factor, up_factor = _quantize_with_fallback(
        (gate_up, theta, theta, theta),
        seeds,
        row_counts,
        shape=shape,
        is_norm=False,
        interleaved=interleaved,
        bits=bits,
        **options,
    )
    return GateQuantized(operand, gate_factor, up_factor)


def silu_gate_quantize_row_blocks(
    gate_up: jax.Array,
    seeds: Seeds,
    *,
    bits: int,
    **options: Unpack[RowBlockOptions],
) -> GateQuantized:
    """See ``fused_reference.silu_gate_quantize_row_blocks``."""
    batch, rows, both = gate_up.shape
    shape = batch, rows, both // 2
    if not can_fuse(shape, options["block"]):
        return fused_reference.silu_gate_quantize_row_blocks(
            gate_up, seeds, bits=bits, ops=quantize_row_blocks, **options
        )
    # The kernel reads gate_up only.
    operand, gate_factor, up_factor = _quantize_row_blocks(
        (gate_up, gate_up, gate_up, gate_up),
        seeds,
        shape=shape,
        is_norm=False,
        bits=bits,
        **options,
    )
    return GateQuantized(operand, gate_factor, up_factor)


def _quantize_with_fallback(
    operands: _Operands,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    criterion: Criterion | None,
    colwise: Rounding | None,
    **options: Any,
) -> tuple[FallbackQuantized, Packed, Packed]:
    """Quantizes a layer with one scale per block; see ``_launch_layer``."""
    shape, block = options["shape"], options["block"]
    out = BlockOutputs(shape, block)
    results, saved, second = _launch_layer(
        operands,
        seeds,
        row_counts,
        outputs=out.fallback("nearest", criterion, colwise),
        roundings=("nearest", colwise),
        CRITERION=criterion,
        **options,
    )
    return as_fallback(shape, results), saved, second


def _quantize_row_blocks(
    operands: _Operands,
    seeds: Seeds,
    *,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    colwise_in_blocks: bool = False,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
    **options: Any,
) -> tuple[Layouts, Packed, Packed]:
    """Quantizes a layer with one scale per row of a block; see ``_launch_layer``."""
    out = RowBlockOutputs(
        options["shape"],
        options["block"],
        sums,
        dtype,
        colwise_in_blocks=colwise_in_blocks,
    )
    no_residual = [output((), jnp.float32, wanted=False)] * 3
    results, saved, second = _launch_layer(
        operands,
        seeds,
        outputs=[*out.rowwise(rowwise), *no_residual, *out.colwise(colwise)],
        roundings=(rowwise, colwise),
        dtype=dtype,
        ROW_BLOCKS=True,
        COLUMN_BLOCKS=colwise_in_blocks,
        COLUMN_SUMS="colwise" in sums,
        **options,
    )
    return out.as_layouts(results[:3], results[6:]), saved, second


def _launch_layer(
    operands: _Operands,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    shape: Shape,
    outputs: list[jax.ShapeDtypeStruct],
    roundings: tuple[Rounding | None, Rounding | None],
    is_norm: bool,
    interleaved: bool = True,
    bits: int,
    block: Block,
    dtype: CodeDtype = "int8",
    global_offset: GlobalOffset | None = None,
    **constants: Any,
) -> tuple[tuple[jax.Array, ...], Packed, Packed]:
    """Quantizes the output ``shape`` of a layer.

    Args:
      operands: the layer's input, the scale of a norm and its ``rstd``, and thresholds;
        an array takes the place of those that are not read.
      seeds: the seeds of stochastic rounding.
      row_counts: the number of rows of each matrix; None for all.
      shape: the shape of the layer's output.
      outputs: main, residual, metric and colwise (``BlockOutputs.fallback``).
      roundings: of the rowwise and of the colwise codes.
      is_norm: whether the layer is a norm, not a gate.
      interleaved: how gate and up are joined.
      bits: the bits of packed codes.
      block: rows and columns of a block.
      dtype: the dtype of the codes.
      global_offset: the offset of this shard in the global matrix.
      **constants: further constants of the kernel.

    Returns:
      The arrays of ``outputs``, and the arrays that the layer saves.  A norm saves one,
      and the second one is without elements.
    """
    seed_arrays, several = seed_arguments(seeds, *roundings)
    _, rows, columns = shape
    constants = {
        "CRITERION": None,
        "ROW_BLOCKS": False,
        "COLUMN_BLOCKS": False,
        "COLUMN_SUMS": False,
    } | constants
    size = block[0] * block[1]
    held = not is_norm and size <= HELD_VALUES
    row_blocks = constants["ROW_BLOCKS"]
    values_of_a_warp = ROW_BLOCK_VALUES_OF_A_WARP if row_blocks else VALUES_OF_A_WARP
    results = launch(
        _quantize_layer,
        *operands,
        *seed_arrays,
        *(global_offset or no_offset(rows)),
        seed_arrays[0] if row_counts is None else row_counts,  # not read if None
        rows,
        columns // block[1],
        outputs=[
            *outputs,
            *packed_outputs(shape, bits),
            *packed_outputs(shape, bits, wanted=not is_norm),
        ],
        grid=(BlockOutputs(shape, block).programs,),
        r=block[0],
        c=block[1],
        num_warps=max(1, size // values_of_a_warp) if held else 4,
        waits=None in roundings,
        PARTS=block[0] // PART_ROWS,
        HELD=held,
        SEVERAL_SEEDS=several,
        BITS=bits,
        ROWWISE=mode_of(roundings[0], dtype),
        COLWISE=mode_of(roundings[1], dtype),
        IS_NORM=is_norm,
        GROUPED=row_counts is not None,
        INTERLEAVED=interleaved,
        **constants,
    )
    return results[:9], as_packed(results[9:14]), as_packed(results[14:])


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
    HELD: tl.constexpr,
    SEVERAL_SEEDS: tl.constexpr,
    BITS: tl.constexpr,
    CRITERION: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
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
    colwise = colwise_codes, colwise_scales, colwise_sums
    outputs = rowwise, metrics, colwise
    modes: tl.constexpr = (ROWWISE, COLWISE, CRITERION, False, False)
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
    held = ()
    if HELD:
        held, saved = COMPUTE(operands, at, r, c)
        _store_saved(packed, saved, at, groups, BITS)
    if ROW_BLOCKS:
        row_outputs = (codes, scales, sums), colwise
        row_modes: tl.constexpr = (ROWWISE, COLWISE, COLUMN_BLOCKS, COLUMN_SUMS, BITS)
        if HELD:
            quantize_row_block(held, noise, row_outputs, at, offsets[1], row_modes)
        else:
            quantize_row_block_parts(
                COMPUTE,
                operands,
                packed,
                noise,
                row_outputs,
                at,
                offsets[1],
                shape,
                row_modes,
            )
    else:
        if HELD:
            amax = find_amax(held)
        else:
            amax = 0.0
            for part in range(at[1] * PARTS, (at[1] + 1) * PARTS):
                here = part_at(at, part)
                y, saved = COMPUTE(operands, here, r // PARTS, c)
                _store_saved(packed, saved, here, groups, BITS)
                amax = accumulate_amax(amax, y)
        quantize_with_fallback(
            VALUES,
            operands,
            held,
            amax,
            theta,
            noise,
            outputs,
            at,
            offsets,
            shape,
            modes,
        )


@triton.jit
def _store_saved(packed, saved, at, groups, BITS: tl.constexpr):
    """Packs and stores the arrays that a layer saves.

    Storing them one after the other would take more registers.
    """
    chunks = ()
    for k in tl.static_range(len(saved)):
        chunks += (pack(saved[k], BITS),)  # type: ignore[assignment]
    for k in tl.static_range(len(saved)):
        store_chunks(packed[k], chunks[k], at, groups, BITS)
