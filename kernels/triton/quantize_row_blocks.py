"""Quantization with one scale per row or per column of a block, in one pass.

One program quantizes one block in both layouts, each with its own scales.  It stores
scales of rows next to those of neighbouring rows, as the GEMM reads them, and XLA
transposes them only where something else needs them.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.hadamard import SIZE, transform_rows
from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    Layouts,
    Quantized,
    check_float8,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton.block_codes import (
    elementwise_max,
    float8_words,
    from_bits,
    largest_column_sum,
    magnitudes,
    multiply,
    round_codes,
    scale_of_codes,
    widen,
)
from fbq_jax.kernels.triton.block_tiles import (
    load,
    locate_block,
    store_colwise,
    store_rowwise,
)
from fbq_jax.kernels.triton.hadamard import computed_once, load_transformed
from fbq_jax.kernels.triton.launch import launch_on_blocks, mode_of, seed_arguments
from fbq_jax.kernels.triton.outputs import (
    BlockOutputs,
    as_layouts,
    output,
    rowwise_codes,
)
from fbq_jax.kernels.triton.quantize import quantize

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
            block, rowwise, colwise, colwise_in_blocks=colwise_in_blocks, sums=sums
        )
    # A layout does not depend on the other side of its rows or columns of blocks.
    main, _ = run((min(r, _LARGEST_TILE // c), c), rowwise, None)
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
    hadamard: bool,
    global_offset: GlobalOffset | None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype,
) -> Layouts:
    """Runs one program per block, which quantizes it in the wanted layouts."""
    if rowwise is None and colwise is None:
        return Layouts(None, None)
    batch, rows, columns = x.shape
    blocks = BlockOutputs(x.shape, block, sums, dtype)
    down, across = blocks.blocks
    colwise_outputs = blocks.colwise(colwise)
    if not colwise_in_blocks:
        of_columns = output((batch, down, columns), jnp.float32, wanted=colwise)
        colwise_outputs[1] = of_columns
    seed_arrays, several = seed_arguments(seeds, rowwise, colwise)
    outputs = launch_on_blocks(
        _quantize_row_blocks,
        x,
        *seed_arrays,
        *(global_offset or no_offset(rows)),
        block=block,
        outputs=[
            rowwise_codes(x.shape, rowwise, dtype),
            output((batch, across, rows), jnp.float32, wanted=rowwise),
            *colwise_outputs,
        ],
        num_warps=_num_warps(block, x.dtype.itemsize, hadamard=hadamard),
        SEVERAL_SEEDS=several,
        ROWWISE=mode_of(rowwise, dtype),
        COLWISE=mode_of(colwise, dtype),
        COLUMN_BLOCKS=colwise_in_blocks,
        COLUMN_SUMS="colwise" in sums,
        HADAMARD=hadamard,
    )
    main, transposed = as_layouts(x.shape, outputs[:2], outputs[2:])
    if not colwise_in_blocks:
        transposed = _transpose_scales(transposed)
    return Layouts(_transpose_scales(main), transposed)


def _transpose_scales(layout: Quantized | None) -> Quantized | None:
    return layout and layout._replace(scales=layout.scales.mT)


def _num_warps(block: Block, itemsize: int, *, hadamard: bool) -> int:
    """Warps for a block: a thread holds 256 bytes of x, or a transformed column.

    With noise in both layouts, each with its own scales, some registers spill.  On an
    H200 that takes two thirds of the time of twice as many warps.
    """
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
):
    columns *= COLUMN_UNIT
    seeds = (seed, calls, not_earlier, stream, index) if SEVERAL_SEEDS else (seed,)
    noise = seeds, row_offsets, column_offset
    at, offsets = locate_block(rows, columns, r, c)
    LOAD: tl.constexpr = load_transformed if HADAMARD else load
    tiles = LOAD(x, at, r, c)
    maxima = _maxima_of_rows(tiles)
    if ROWWISE is not None:
        inverses = _store_row_scales(maxima, row_scales, at, tiles, ROWWISE)
        v = ()
        for k in tl.static_range(4):
            tile = widen(tiles[k]) * inverses[k][:, None]
            v += (tile,)  # type: ignore[assignment]
        store_rowwise(codes, round_codes(v, noise, at, ROWWISE), at)
    if COLWISE is not None:
        if COLUMN_BLOCKS:
            amax = from_bits(tl.max(elementwise_max(maxima)), tiles[0].dtype)
            scale, inverse = scale_of_codes(amax, COLWISE)
            tl.store(column_scales + offsets[1], scale)
            v = multiply(tiles, inverse)
        else:
            v = _scale_columns(tiles, column_scales, at, COLWISE)
        if COLWISE == "float8":
            rounded = float8_words(v)
        else:
            rounded = round_codes(v, noise, at, COLWISE)
        if HADAMARD:
            rounded = computed_once(rounded)
        store_colwise(column_codes, rounded, at)
        if COLUMN_SUMS:
            tl.store(column_sums + offsets[1], largest_column_sum(rounded))


@triton.jit
def _maxima_of_rows(tiles):
    """The bits of ``max |x|`` of rows in int32, one vector for each tile."""
    bits = magnitudes(tiles)
    maxima = ()
    for k in tl.static_range(4):
        maxima += (tl.max(bits[k].to(tl.int32), 1),)
    return maxima


@triton.jit
def _store_row_scales(maxima, scales, at, tiles, MODE: tl.constexpr):
    """Stores the scales of rows; returns their inverses, one vector for each tile."""
    batch, i, j, rows, columns = at
    r: tl.constexpr = 4 * tiles[0].shape[0]
    c: tl.constexpr = tiles[0].shape[1]
    scales += (batch * tl.cdiv(columns, c) + j) * rows
    inverses = ()
    for k in tl.static_range(4):
        amax = from_bits(maxima[k], tiles[k].dtype)
        scale, inverse = scale_of_codes(amax, MODE)
        row = i * r + 4 * tl.arange(0, r // 4) + k
        tl.store(scales + row, scale, row < rows)
        inverses += (inverse,)  # type: ignore[assignment]
    return inverses


@triton.jit
def _scale_columns(tiles, scales, at, MODE: tl.constexpr):
    """Stores the scales of columns; returns the tiles in units of these scales."""
    batch, i, j, rows, columns = at
    r: tl.constexpr = 4 * tiles[0].shape[0]
    c: tl.constexpr = tiles[0].shape[1]
    scales += (batch * tl.cdiv(rows, r) + i) * columns
    top = tl.max(elementwise_max(magnitudes(tiles)).to(tl.int32), 0)
    scale, inverse = scale_of_codes(from_bits(top, tiles[0].dtype), MODE)
    column = j * c + tl.arange(0, c)
    tl.store(scales + column, scale, column < columns)
    return multiply(tiles, inverse[None, :])
