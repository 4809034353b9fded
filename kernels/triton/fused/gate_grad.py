"""The gradient of the SiLU gate, fused with its quantization."""

import itertools
from typing import Unpack

import jax
import triton
import triton.language as tl

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    Layouts,
    QuantizeOptions,
    RowBlockOptions,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton import quantize, quantize_row_blocks
from fbq_jax.kernels.triton.block_codes import (
    find_amax,
    multiply,
    scale_and_inverse,
    widen,
)
from fbq_jax.kernels.triton.block_quantize import (
    store_empty,
    store_rounded,
    store_sums,
)
from fbq_jax.kernels.triton.block_tiles import locate_block
from fbq_jax.kernels.triton.fused.layers import find_half, load_source
from fbq_jax.kernels.triton.fused.packed_arrays import can_fuse, packed_inputs
from fbq_jax.kernels.triton.launch import launch, mode_of, seed_arguments
from fbq_jax.kernels.triton.outputs import (
    BlockOutputs,
    RowBlockOutputs,
    Shape,
    as_layouts,
)
from fbq_jax.kernels.triton.packed import GROUP, load_packed
from fbq_jax.kernels.triton.row_block_quantize import quantize_row_block

# The values of a block that a warp holds: the fastest on an H100.
VALUES_OF_A_WARP = 2**11
MOST_ROWS = 128  # of a block; fbq_jax.ops.fused says so


def silu_gate_grad_quantize(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    bits: int,
    interleaved: bool = True,
    **options: Unpack[QuantizeOptions],
) -> Layouts:
    """See ``fused_reference.silu_gate_grad_quantize``."""
    if not _can_fuse(dy.shape, options["block"]):
        return fused_reference.silu_gate_grad_quantize(
            dy,
            gate_factor,
            up_factor,
            seeds,
            row_counts,
            bits=bits,
            interleaved=interleaved,
            ops=quantize,
            **options,
        )
    sums = options.get("sums", ())
    out = BlockOutputs(_shape(dy), options["block"], sums)
    results = _launch(
        (dy, gate_factor, up_factor),
        seeds,
        row_counts,
        out=out,
        bits=bits,
        INTERLEAVED=interleaved,
        **options,
    )
    return as_layouts(out.shape, results[:3], results[3:])


def silu_gate_grad_quantize_row_blocks(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    seeds: Seeds,
    *,
    bits: int,
    **options: Unpack[RowBlockOptions],
) -> Layouts:
    """See ``fused_reference.silu_gate_grad_quantize_row_blocks``."""
    operands = dy, gate_factor, up_factor
    if not _can_fuse(dy.shape, options["block"]):
        return fused_reference.silu_gate_grad_quantize_row_blocks(
            *operands, seeds, bits=bits, ops=quantize_row_blocks, **options
        )
    out = RowBlockOutputs(
        _shape(dy),
        options["block"],
        options.get("sums", ()),
        options.get("dtype", "int8"),
        colwise_in_blocks=options.get("colwise_in_blocks", False),
    )
    results = _launch(operands, seeds, out=out, bits=bits, ROW_BLOCKS=True, **options)
    return out.as_layouts(results[:3], results[3:])


def _can_fuse(shape: Shape, block: Block) -> bool:
    """Whether registers hold the values of a block, too."""
    return can_fuse(shape, block) and block[0] <= MOST_ROWS


def _shape(dy: jax.Array) -> Shape:
    """The shape of the gradient of gate and up."""
    batch, rows, columns = dy.shape
    return batch, rows, 2 * columns


def _launch(
    operands: tuple[jax.Array, Packed, Packed],
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    out: BlockOutputs,
    bits: int,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
    colwise_in_blocks: bool = False,
    ROW_BLOCKS: bool = False,
    INTERLEAVED: bool = True,
) -> tuple[jax.Array, ...]:
    """Returns the outputs of both layouts."""
    dy, *factors = operands
    _, rows, columns = dy.shape
    seed_arrays, several = seed_arguments(seeds, rowwise, colwise)
    packed = (packed_inputs(factor, bits, unused=seed_arrays[0]) for factor in factors)
    return launch(
        _silu_gate_grad_quantize,
        dy,
        *itertools.chain(*packed),
        *seed_arrays,
        *(global_offset or no_offset(rows)),
        seed_arrays[0] if row_counts is None else row_counts,  # not read if None
        rows,
        columns // block[1],
        outputs=[*out.rowwise(rowwise), *out.colwise(colwise)],
        grid=(out.programs,),
        r=block[0],
        c=block[1],
        num_warps=max(1, block[0] * block[1] // VALUES_OF_A_WARP),
        programs=2,
        SEVERAL_SEEDS=several,
        BITS=bits,
        ROWWISE=mode_of(rowwise, dtype),
        COLWISE=mode_of(colwise, dtype),
        ROW_BLOCKS=ROW_BLOCKS,
        COLUMN_BLOCKS=colwise_in_blocks,
        ROW_SUMS="rowwise" in sums,
        COLUMN_SUMS="colwise" in sums,
        GROUPED=row_counts is not None,
        INTERLEAVED=INTERLEAVED,
    )


@triton.jit
def _silu_gate_grad_quantize(
    dy,
    gate_plane_8,
    gate_plane_4,
    gate_plane_2,
    gate_plane_1,
    gate_scales,
    up_plane_8,
    up_plane_4,
    up_plane_2,
    up_plane_1,
    up_scales,
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
    colwise_codes,
    colwise_scales,
    colwise_sums,
    r: tl.constexpr,
    c: tl.constexpr,
    SEVERAL_SEEDS: tl.constexpr,
    BITS: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    ROW_SUMS: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
    GROUPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One program quantizes a block of the gate's gradient, or one of up's."""
    modes: tl.constexpr = (ROWWISE, COLWISE, None, ROW_SUMS, COLUMN_SUMS)
    seeds = (seed, calls, not_earlier, stream, index) if SEVERAL_SEEDS else (seed,)
    noise = seeds, row_offsets, column_offset
    at, offsets = locate_block(rows, 2 * groups * c, r, c)
    batch, i, column, _, _ = at
    # Neighbouring programs of an interleaved gradient share a block of dy.
    j, is_up = find_half(column, groups, INTERLEAVED)
    factor = (
        (
            tl.where(is_up, up_plane_8, gate_plane_8),
            tl.where(is_up, up_plane_4, gate_plane_4),
            tl.where(is_up, up_plane_2, gate_plane_2),
            tl.where(is_up, up_plane_1, gate_plane_1),
        ),
        tl.where(is_up, up_scales, gate_scales),
    )
    rowwise = codes, scales, sums
    colwise = colwise_codes, colwise_scales, colwise_sums
    source = (dy,)
    if GROUPED:
        row_count = tl.load(row_counts + batch)
        if row_count == 0:
            store_empty(((rowwise, ()), (), colwise), offsets, modes)
            return
        source = dy, batch * rows, row_count  # type: ignore[assignment]
    tiles = _values(source, factor, (batch, i, j, rows, groups * c), groups, r, BITS)
    if ROW_BLOCKS:
        quantize_row_block(
            tiles,
            noise,
            (rowwise, colwise),
            at,
            offsets[1],
            (ROWWISE, COLWISE, COLUMN_BLOCKS, COLUMN_SUMS),
        )
    else:
        scale, inverse = scale_and_inverse(find_amax(tiles))
        tl.store(scales + offsets[0], scale)
        tl.store(colwise_scales + offsets[1], scale)
        stored = codes, colwise_codes
        code_sums = store_rounded(stored, multiply(tiles, inverse), noise, at, modes)
        store_sums(code_sums, (sums, colwise_sums), offsets, modes)


@triton.jit
def _values(source, factor, at, groups, r: tl.constexpr, BITS: tl.constexpr):
    """The tiles of dy times a packed factor, in the dtype of dy."""
    tiles = load_source(source, at, r, GROUP)
    factors = load_packed(factor, at, groups, r, BITS)
    y = ()
    for k in tl.static_range(4):
        y += ((widen(tiles[k]) * factors[k]).to(tiles[k].dtype),)  # type: ignore[assignment]
    return y
