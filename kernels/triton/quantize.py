"""Block quantization, with fallback and transposition, in one pass over the operand.

One program quantizes one block; the device code is in ``block_quantize``.  A block
that is too large for the registers is quantized in parts.
"""

from typing import Any, Unpack

import jax
import triton
import triton.language as tl

from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    Criterion,
    FallbackOptions,
    FallbackQuantized,
    Layouts,
    QuantizeOptions,
    check_float8,
)
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, Seeds, no_offset
from fbq_jax.kernels.triton.block_quantize import (
    load_and_measure,
    quantize_with_fallback,
    store_empty,
)
from fbq_jax.kernels.triton.block_tiles import load, load_of_group, locate_block
from fbq_jax.kernels.triton.launch import launch_on_blocks, mode_of, seed_arguments
from fbq_jax.kernels.triton.outputs import BlockOutputs, as_fallback, as_layouts


def quantize(x: jax.Array, seeds: Seeds, **options: Unpack[QuantizeOptions]) -> Layouts:
    """See ``reference.quantize``."""
    results = _quantize_blocks(x, None, seeds, criterion=None, **options)
    return as_layouts(x.shape, results[:3], results[6:])


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    **options: Unpack[FallbackOptions],
) -> FallbackQuantized:
    """See ``reference.quantize_fallback``."""
    results = _quantize_blocks(x, theta, seeds, rowwise="nearest", **options)
    return as_fallback(x.shape, results)


def ragged_quantize(
    x: GroupedRows, seeds: Seeds, **options: Unpack[QuantizeOptions]
) -> Layouts:
    """See ``grouped_reference.ragged_quantize``."""
    results = _quantize_blocks(x, None, seeds, criterion=None, **options)
    return as_layouts(_shape(x, options["block"]), results[:3], results[6:])


def ragged_quantize_fallback(
    x: GroupedRows,
    theta: jax.Array,
    seeds: Seeds,
    **options: Unpack[FallbackOptions],
) -> FallbackQuantized:
    """See ``grouped_reference.ragged_quantize_fallback``."""
    results = _quantize_blocks(x, theta, seeds, rowwise="nearest", **options)
    return as_fallback(_shape(x, options["block"]), results)


def _shape(x: jax.Array | GroupedRows, block: Block) -> tuple[int, int, int]:
    """The shape of the matrices to quantize; those of grouped rows are the tiles."""
    if isinstance(x, GroupedRows):
        return len(x.first_rows), block[0], x.values.shape[1]
    batch, rows, columns = x.shape
    return batch, rows, columns


def _quantize_blocks(
    x: jax.Array | GroupedRows,
    theta: jax.Array | None,
    seeds: Seeds,
    *,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    criterion: Criterion | None,
    global_offset: GlobalOffset | None = None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
) -> tuple[jax.Array, ...]:
    """Returns the outputs of ``BlockOutputs.fallback``."""
    check_float8(dtype, rowwise, colwise, sums)
    is_noisy = "stochastic" in (rowwise, colwise)
    seed_arrays, several = seed_arguments(seeds, rowwise, colwise)
    shape = _shape(x, block)
    out = BlockOutputs(shape, block, sums, dtype)
    if isinstance(x, GroupedRows):
        values, *tiles = x
    else:
        values, tiles = x, [seed_arrays[0]] * 2  # not read
        # A program need not load and round rows that the only row of blocks lacks.
        block = min(block[0], max(16, triton.next_power_of_2(shape[1]))), block[1]
    return _launch(
        _quantize,
        values,
        seed_arrays[0] if theta is None else theta,  # not read without a criterion
        *seed_arrays,
        *(global_offset or no_offset(shape[1])),
        *tiles,
        shape=shape,
        block=block,
        outputs=out.fallback(rowwise, criterion, colwise),
        many_registers=len(sums) == 2
        or (is_noisy and (criterion is not None or values.dtype.itemsize == 4)),
        same_codes=rowwise == colwise,
        waits=rowwise is None or colwise is None,
        GROUPED=isinstance(x, GroupedRows),
        SEVERAL_SEEDS=several,
        ROWWISE=mode_of(rowwise, dtype),
        CRITERION=criterion,
        COLWISE=mode_of(colwise, dtype),
        ROW_SUMS="rowwise" in sums,
        COLUMN_SUMS="colwise" in sums,
    )


def _launch(
    kernel: triton.JITFunction,
    *args: jax.Array,
    block: Block,
    many_registers: bool,
    same_codes: bool,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on every block of its first argument.

    Fewer warps share more work, such as the noise keys and reductions, but each thread
    then holds more elements.  A kernel that needs ``many_registers`` per element gets
    twice as many warps.  One that stores the ``same_codes`` in both layouts leaves
    registers for three programs of four warps, the fastest on an H200.
    """
    size = block[0] * block[1]
    parts, num_warps = 1, max(1, size // (2**11 if many_registers else 2**12))
    if size > 2**14:
        parts, num_warps = size // 2**13, 8
    return launch_on_blocks(
        kernel,
        *args,
        block=block,
        num_warps=num_warps,
        programs=3 if same_codes and num_warps <= 4 else None,
        PARTS=parts,
        **options,
    )


@triton.jit
def _quantize(
    x,
    theta,
    seed,
    calls,
    not_earlier,
    stream,
    index,
    row_offsets,
    column_offset,
    first_rows,
    row_counts,
    rows,
    columns,
    codes,
    scales,
    sums,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    colwise_sums,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    SEVERAL_SEEDS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWWISE: tl.constexpr,
    CRITERION: tl.constexpr,
    COLWISE: tl.constexpr,
    ROW_SUMS: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
):
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    seeds = (seed, calls, not_earlier, stream, index) if SEVERAL_SEEDS else (seed,)
    noise = seeds, row_offsets, column_offset
    rowwise = (codes, scales, sums), (residual_codes, residual_scales)
    outputs = rowwise, metrics, (colwise_codes, colwise_scales, colwise_sums)
    modes: tl.constexpr = (ROWWISE, COLWISE, CRITERION, ROW_SUMS, COLUMN_SUMS)
    at, offsets = locate_block(rows, columns * COLUMN_UNIT, r, c)
    VALUES: tl.constexpr = load_of_group if GROUPED else load
    source = x
    if GROUPED:
        row_count = tl.load(row_counts + at[0])
        if row_count == 0:
            store_empty(outputs, offsets, modes)
            return
        source = x, tl.load(first_rows + at[0]).to(tl.int64), row_count
    held, amax = load_and_measure(VALUES, source, at, shape)
    quantize_with_fallback(
        VALUES, source, held, amax, theta, noise, outputs, at, offsets, shape, modes
    )
