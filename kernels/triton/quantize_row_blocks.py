"""Quantization with one scale per row or per column of a block, in one pass.

One program quantizes one block in both layouts, each with its own scales.  It stores
scales of rows next to those of neighbouring rows, as the GEMM reads them, and XLA
transposes them only where something else needs them.
"""

import functools

import jax
import triton
import triton.language as tl

from fbq_jax.kernels.hadamard import SIZE, transform_rows
from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    Layouts,
    check_float8,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton.block_tiles import load, locate_block
from fbq_jax.kernels.triton.hadamard import load_transformed
from fbq_jax.kernels.triton.launch import launch_on_blocks, mode_of, seed_arguments
from fbq_jax.kernels.triton.outputs import RowBlockOutputs
from fbq_jax.kernels.triton.quantize import quantize
from fbq_jax.kernels.triton.row_block_quantize import quantize_row_block

# The most values of a block that a program holds at once.
_LARGEST_TILE = 2**14


def quantize_row_blocks(
    x: jax.Array,
    seeds: Seeds,
    factors: jax.Array | None = None,
    *,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    colwise_in_blocks: bool = False,
    hadamard: bool = False,
    global_offset: GlobalOffset | None = None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
) -> Layouts:
    """See ``reference.quantize_row_blocks``.

    The transform is fused for blocks of 128 rows; for others, XLA computes it.  Blocks
    of more than 128x128 values are read once for each layout.
    """
    check_float8(dtype, rowwise, colwise, sums)
    if hadamard and block[0] != SIZE:
        x, hadamard = transform_rows(x), False
    r, c = block
    run = functools.partial(
        _launch, x, seeds, hadamard=hadamard, global_offset=global_offset, dtype=dtype
    )
    if r * c <= _LARGEST_TILE:
        return run(
            factors,
            block,
            rowwise,
            colwise,
            colwise_in_blocks=colwise_in_blocks,
            sums=sums,
        )
    # A layout does not depend on the other side of its rows or columns of blocks.
    main, _ = run(factors, (min(r, _LARGEST_TILE // c), c), rowwise, None)
    if colwise_in_blocks:
        assert not hadamard
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
        _, transposed = run(None, (r, min(c, _LARGEST_TILE // r)), None, colwise)
    return Layouts(main, transposed)


def _launch(
    x: jax.Array,
    seeds: Seeds,
    factors: jax.Array | None,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    *,
    colwise_in_blocks: bool = False,
    hadamard: bool,
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
        x if factors is None else factors,  # not read without factors
        block=block,
        outputs=[*out.rowwise(rowwise)[:2], *out.colwise(colwise)],
        num_warps=_num_warps(block, x.dtype.itemsize, hadamard=hadamard),
        waits=rowwise is None or colwise is None,
        SEVERAL_SEEDS=several,
        ROWWISE=mode_of(rowwise, dtype),
        COLWISE=mode_of(colwise, dtype),
        COLUMN_BLOCKS=colwise_in_blocks,
        COLUMN_SUMS="colwise" in sums,
        HADAMARD=hadamard,
        FACTORS=factors is not None,
    )
    return out.as_layouts(outputs[:2], outputs[2:])


def _num_warps(block: Block, itemsize: int, *, hadamard: bool) -> int:
    """Warps for a block: a thread holds 256 bytes of x, or a transformed column."""
    r, c = block
    values = 2**12 if itemsize == 2 else 2**11  # of a warp
    return max(1, c // 32) if hadamard else max(1, r * c // values)


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
    factors,
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
    HADAMARD: tl.constexpr,
    FACTORS: tl.constexpr,
):
    columns *= COLUMN_UNIT
    seeds = (seed, calls, not_earlier, stream, index) if SEVERAL_SEEDS else (seed,)
    noise = seeds, row_offsets, column_offset
    at, offsets = locate_block(rows, columns, r, c)
    LOAD: tl.constexpr = load_transformed if HADAMARD else load
    tiles = LOAD(x, at, r, c)
    quantize_row_block(
        tiles,
        noise,
        ((codes, row_scales), (column_codes, column_scales, column_sums)),
        at,
        offsets[1],
        (ROWWISE, COLWISE, COLUMN_BLOCKS, COLUMN_SUMS),
        HADAMARD,
        factors if FACTORS else None,
    )
