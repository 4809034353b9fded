"""Quantization with one scale per row or per column of a block, in one pass.

One program quantizes one block in both layouts, each with its own scales.  It stores
scales of rows next to those of neighbouring rows, as the GEMM reads them, and XLA
transposes them only where something else needs them.
"""

import functools

import jax
import triton
import triton.language as tl

from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    Layouts,
    check_float8,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton.block_tiles import load, locate_block
from fbq_jax.kernels.triton.launch import launch_on_blocks, mode_of, seed_arguments
from fbq_jax.kernels.triton.outputs import RowBlockOutputs
from fbq_jax.kernels.triton.quantize import quantize
from fbq_jax.kernels.triton.row_block_quantize import quantize_row_block

# The most values of a block that a program holds at once.
_LARGEST_TILE = 2**14


def quantize_row_blocks(
    x: jax.Array,
    seeds: Seeds,
    *,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    colwise_in_blocks: bool = False,
    global_offset: GlobalOffset | None = None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
) -> Layouts:
    """See ``reference.quantize_row_blocks``.

    Blocks of more than 128x128 values are read once for each layout.
    """
    check_float8(dtype, rowwise, colwise, sums)
    r, c = block
    run = functools.partial(_launch, x, seeds, global_offset=global_offset, dtype=dtype)
    if r * c <= _LARGEST_TILE:
        return run(
            block,
            rowwise,
            colwise,
            colwise_in_blocks=colwise_in_blocks,
            sums=sums,
        )
    # A layout does not depend on the other side of its rows or columns of blocks.
    main, _ = run((min(r, _LARGEST_TILE // c), c), rowwise, None)
    if colwise_in_blocks:
        _, transposed = quantize(
            x,
            seeds,
            block=block,
            rowwise=None,
            colwise=colwise,
            global_offset=global_offset,
            sums=sums,
            dtype=dtype,
        )
    else:
        _, transposed = run((r, min(c, _LARGEST_TILE // r)), None, colwise)
    return Layouts(main, transposed)


def _launch(
    x: jax.Array,
    seeds: Seeds,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    *,
    colwise_in_blocks: bool = False,
    global_offset: GlobalOffset | None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype,
) -> Layouts:
    """Runs one program per block, which quantizes it in the wanted layouts."""
    if rowwise is None and colwise is None:
        return Layouts(None, None)
    out = RowBlockOutputs(
        x.shape, block, sums, dtype, colwise_in_blocks=colwise_in_blocks
    )
    seed_arrays, several = seed_arguments(seeds, rowwise, colwise)
    outputs = launch_on_blocks(
        _quantize_row_blocks,
        x,
        *seed_arrays,
        *(global_offset or no_offset(x.shape[1])),
        block=block,
        outputs=[*out.rowwise(rowwise)[:2], *out.colwise(colwise)],
        num_warps=_num_warps(block, x.dtype.itemsize),
        waits=rowwise is None or colwise is None,
        SEVERAL_SEEDS=several,
        ROWWISE=mode_of(rowwise, dtype),
        COLWISE=mode_of(colwise, dtype),
        COLUMN_BLOCKS=colwise_in_blocks,
        COLUMN_SUMS="colwise" in sums,
    )
    return out.as_layouts(outputs[:2], outputs[2:])


def _num_warps(block: Block, itemsize: int) -> int:
    """Warps for a block: a thread holds 256 bytes of x."""
    r, c = block
    values = 2**12 if itemsize == 2 else 2**11  # of a warp
    return max(1, r * c // values)


@triton.jit
def _quantize_row_blocks(
    x,
    seed,
    calls,
    not_earlier,
    stream,
    index,
    row_offsets,
    column_offset,
    rows,
    columns,
    codes,
    row_scales,
    column_codes,
    column_scales,
    column_sums,
    r: tl.constexpr,
    c: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    SEVERAL_SEEDS: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
):
    columns *= COLUMN_UNIT
    seeds = (seed, calls, not_earlier, stream, index) if SEVERAL_SEEDS else (seed,)
    noise = seeds, row_offsets, column_offset
    at, offsets = locate_block(rows, columns, r, c)
    quantize_row_block(
        load(x, at, r, c),
        noise,
        ((codes, row_scales), (column_codes, column_scales, column_sums)),
        at,
        offsets[1],
        (ROWWISE, COLWISE, COLUMN_BLOCKS, COLUMN_SUMS),
    )
