"""Quantization of one block in a Triton program, one part after the other.

The parts of a block are ranges of its rows and share its scale.  A program visits them
twice: first for the maximum, then for the codes.  The second time, values come from a
cache or are computed again.

Device functions share these arguments, besides those of ``block_tiles``:

- ``VALUES``, ``operands``: the source of the values.  ``VALUES(operands, at, r, c)`` is
  a device function that returns the tiles of one part of ``r x c`` elements, such as
  ``block_tiles.load``, whose operand is a pointer.
- ``held``: the tiles of the block, if registers hold them; otherwise ().
- ``shape``: ``(PARTS, r, c)``, the number of parts of a block whose values a program
  loads or computes at once, and the shape of a part.
- ``scaling``: ``(amax, scale, inverse)`` of a block.
- ``modes``: ``(rowwise, colwise, criterion, row_sums, column_sums)``: the mode of each
  layout (``block_codes``), the criterion of fallback or None, and for each layout
  whether it gets sums of codes.
"""

import triton
import triton.language as tl

from fbq_jax.kernels.triton.block_codes import (
    accumulate_amax,
    find_amax,
    float8,
    float8_words,
    largest_column_sum,
    largest_row_sum,
    metric_of,
    multiply,
    nearest,
    residual_of,
    scale_and_inverse,
    scale_of_codes,
    shrink_of,
    stochastic,
    sum_abs,
)
from fbq_jax.kernels.triton.block_tiles import (
    part_at,
    store_colwise,
    store_rowwise,
)


@triton.jit
def load_and_measure(VALUES: tl.constexpr, operands, at, shape):
    """Loads a block; returns ``held`` and ``max |x|`` of all its parts."""
    PARTS: tl.constexpr = shape[0]
    r: tl.constexpr = shape[1]
    c: tl.constexpr = shape[2]
    i = at[1]
    tiles = VALUES(operands, part_at(at, i * PARTS), r, c)
    amax = find_amax(tiles)
    for part in range(i * PARTS + 1, (i + 1) * PARTS):
        amax = accumulate_amax(amax, VALUES(operands, part_at(at, part), r, c))
    return (tiles if PARTS == 1 else ()), amax


@triton.jit
def quantize_parts(
    VALUES: tl.constexpr, operands, held, scaling, noise, outputs, at, shape, modes
):
    """Rounds a block and stores its codes in the requested layouts.

    ``outputs`` are the rowwise and the colwise codes.

    Returns:
      ``sum |x - scale * codes|`` with nearest rounding, and ``sum |x|``, both times
      ``shrink_of(scale)``, each 0 if the criterion does not need it.  And
      ``sum |codes|``, each 0 if it is not wanted: the largest of a row, and an upper
      bound of those of columns, exact for one part.
    """
    PARTS: tl.constexpr = shape[0]
    r: tl.constexpr = shape[1]
    c: tl.constexpr = shape[2]
    i = at[1]
    error, total = 0.0, 0.0
    row_sum, column_sum = 0.0, 0.0
    # A loop of one step would take more registers.
    if len(held) > 0:
        error, total, sums = _quantize_part(held, scaling, noise, outputs, at, modes)
        row_sum, column_sum = sums
    else:
        for part in range(i * PARTS, (i + 1) * PARTS):
            here = part_at(at, part)
            tiles = VALUES(operands, here, r, c)
            part_error, part_total, sums = _quantize_part(
                tiles, scaling, noise, outputs, here, modes
            )
            error += part_error
            total += part_total
            row_sum = tl.maximum(row_sum, sums[0])
            column_sum += sums[1]
    return error, total, (row_sum, column_sum)


@triton.jit
def _quantize_part(tiles, scaling, noise, outputs, at, modes):
    """``quantize_parts`` of the tiles of one part."""
    CRITERION: tl.constexpr = modes[2]
    _, scale, inverse = scaling
    v = multiply(tiles, inverse)
    sums = store_rounded(outputs, v, noise, at, modes)
    error, total = 0.0, 0.0
    if CRITERION == "l1" or CRITERION == "l1_rel":
        error = sum_abs(residual_of(tiles, nearest(v), scale), shrink_of(scale))
    if CRITERION == "l1_rel":
        total = sum_abs(tiles, shrink_of(scale))
    return error, total, sums


@triton.jit
def store_rounded(outputs, v, noise, at, modes):
    """Rounds values in units of their scale and stores the requested layouts.

    Returns the largest ``sum |codes|`` of a row and of a column, each 0 if it is not
    wanted.
    """
    codes, colwise_codes = outputs
    ROWWISE: tl.constexpr = modes[0]
    COLWISE: tl.constexpr = modes[1]
    row_sum, column_sum = 0.0, 0.0
    if ROWWISE == "float8":
        store_rowwise(codes, float8(v), at)
    if COLWISE == "float8":
        store_colwise(colwise_codes, float8_words(v), at)
    if ROWWISE == "nearest" or COLWISE == "nearest":
        rounded = nearest(v)
        if ROWWISE == "nearest":
            store_rowwise(codes, rounded, at)
            if modes[3]:
                row_sum = largest_row_sum(rounded)
        if COLWISE == "nearest":
            store_colwise(colwise_codes, rounded, at)
            if modes[4]:
                column_sum = largest_column_sum(rounded)
    if ROWWISE == "stochastic" or COLWISE == "stochastic":
        noisy = stochastic(v, noise, at)
        if ROWWISE == "stochastic":
            store_rowwise(codes, noisy, at)
            if modes[3]:
                row_sum = largest_row_sum(noisy)
        if COLWISE == "stochastic":
            store_colwise(colwise_codes, noisy, at)
            if modes[4]:
                column_sum = largest_column_sum(noisy)
    return row_sum, column_sum


@triton.jit
def store_sums(sums, pointers, offsets, modes):
    """Stores the sums of a block's rowwise and colwise codes, where they are wanted."""
    if modes[3]:
        tl.store(pointers[0] + offsets[0], sums[0])
    if modes[4]:
        tl.store(pointers[1] + offsets[1], sums[1])


@triton.jit
def store_empty(outputs, offsets, modes):
    """Stores scales, sums and the metric of a block without rows: zeros.

    ``outputs`` are those of ``quantize_with_fallback``.
    """
    rowwise, metrics, colwise = outputs
    offset, colwise_offset = offsets
    tl.store(rowwise[0][1] + offset, 0.0)
    tl.store(colwise[1] + colwise_offset, 0.0)
    store_sums((0.0, 0.0), (rowwise[0][2], colwise[2]), offsets, modes)
    if modes[2] is not None:
        tl.store(metrics + offset, 0.0)
        tl.store(rowwise[1][1] + offset, 0.0)


@triton.jit
def quantize_with_fallback(
    VALUES: tl.constexpr,
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
):
    """Stores everything that ``reference.quantize_fallback`` returns for one block.

    ``outputs`` is ``((main, residual), metrics, colwise)``; main and colwise are codes,
    scales and sums, residual is codes and scales.  Without a criterion, there is
    neither a metric nor a residual.
    """
    rowwise, metrics, colwise = outputs
    codes, scales, sums = rowwise[0]
    residual_codes, residual_scales = rowwise[1]
    colwise_codes, colwise_scales, colwise_sums = colwise
    offset, colwise_offset = offsets
    CRITERION: tl.constexpr = modes[2]
    scale, inverse = scale_of_codes(amax, modes[1] if modes[0] is None else modes[0])
    tl.store(scales + offset, scale)
    tl.store(colwise_scales + colwise_offset, scale)
    scaling = amax, scale, inverse
    stored = codes, colwise_codes
    error, total, code_sums = quantize_parts(
        VALUES, operands, held, scaling, noise, stored, at, shape, modes
    )
    store_sums(code_sums, (sums, colwise_sums), offsets, modes)
    if CRITERION is not None:
        metric = metric_of(scaling, (error, total), CRITERION)
        tl.store(metrics + offset, metric)
        residual_scale = 0.0
        limit = tl.load(theta + at[0])
        limit = tl.where(limit >= 0.0, limit, 0.0)
        # The second condition is false where scale * 127 overflows.
        if (metric > limit) & (scale * 127.0 < float("inf")):
            residual_scale = _store_residual(
                VALUES, operands, scaling, residual_codes, at, shape
            )
        tl.store(residual_scales + offset, residual_scale)


@triton.jit
def _store_residual(VALUES: tl.constexpr, operands, scaling, codes, at, shape):
    """Stores the codes of a block's residual and returns its scale.

    Values are loaded or computed again: keeping them in registers until here would slow
    down every block.
    """
    PARTS: tl.constexpr = shape[0]
    r: tl.constexpr = shape[1]
    c: tl.constexpr = shape[2]
    i = at[1]
    amax = 0.0
    for part in range(i * PARTS, (i + 1) * PARTS):
        tiles = VALUES(operands, part_at(at, part), r, c)
        amax = tl.maximum(amax, find_amax(_nearest_residual(tiles, scaling)))
    residual_scale, inverse = scale_and_inverse(amax)
    for part in range(i * PARTS, (i + 1) * PARTS):
        here = part_at(at, part)
        tiles = VALUES(operands, here, r, c)
        rounded = nearest(multiply(_nearest_residual(tiles, scaling), inverse))
        store_rowwise(codes, rounded, here)
    return residual_scale


@triton.jit
def _nearest_residual(tiles, scaling):
    """The tiles' residual after nearest rounding."""
    _, scale, inverse = scaling
    return residual_of(tiles, nearest(multiply(tiles, inverse)), scale)
