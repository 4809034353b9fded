"""Quantization of one block in a Triton program.

A program holds its block in registers, or visits its *parts*, ranges of its rows, one
after the other.  Parts share the scale of the block.  So a program visits them twice:
first for the maximum, then for the codes; and again for a residual.  After the first
time, values come from a cache or are computed again.

Device functions share these arguments, and others that ``block_tiles`` describes:

- ``SOURCE``, ``operands``: the source of the values.  ``SOURCE(operands, at, r,
  CONFIG)`` is a device function that returns the tiles of one part of ``r`` rows, and a
  tuple of tiles to pack.
- ``packed``: where the latter are stored (``packed.store_saved``).
- ``noise``: what ``block_codes.noise_keys`` takes.
- ``outputs``: ``((codes, scales, sums), (codes, scales, metrics), (codes, scales,
  sums))`` of the rowwise layout, its residual and the colwise layout.
- ``offsets``: of the block among the scales of blocks, rowwise and colwise.
- ``scaling``: ``(amax, scale, inverse)`` of a block.
- ``CONFIG``: a ``Config``.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fbq_jax.kernels.quantized import Criterion
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
from fbq_jax.kernels.triton.block_tiles import part_at, store_colwise, store_rowwise
from fbq_jax.kernels.triton.packed import store_saved


class Config(NamedTuple):
    """What a quantizing kernel is compiled for.

    Attributes:
      r: the rows of a block.
      c: the columns of a block.
      held: whether registers hold a block.
      parts: the number of parts of a block, for visits to its parts.
      column_unit: what the kernel multiplies its argument ``units`` by to get columns.
      rowwise: the mode of the rowwise layout (``block_codes``).
      colwise: the mode of the colwise layout.
      in_rows: whether each row of a block has a scale in the rowwise layout, and each
        column in the colwise layout.
      colwise_in_blocks: whether the colwise layout has a scale per block nevertheless.
      row_sums: whether the rowwise layout gets sums of codes.
      column_sums: whether the colwise layout gets sums of codes.
      criterion: the criterion of fallback.
      folds_seeds: whether seeds are ``rounding.MatrixSeeds``.
      is_grouped: whether ``row_counts`` has the number of rows of each matrix.
      bits: the bits of packed codes.
      interleaved: how gate and up are joined.
    """

    r: int
    c: int
    held: bool
    parts: int
    column_unit: int
    rowwise: str | None
    colwise: str | None
    in_rows: bool
    colwise_in_blocks: bool
    row_sums: bool
    column_sums: bool
    criterion: Criterion | None
    folds_seeds: bool
    is_grouped: bool
    bits: int
    interleaved: bool


@triton.jit
def quantize_block(
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
    """Stores all that ``reference.quantize`` returns for a block with one scale."""
    r: tl.constexpr = CONFIG.r // CONFIG.parts
    i = at[1]
    held = ()
    if CONFIG.held:
        held, saved = SOURCE(operands, at, CONFIG.r, CONFIG)
        store_saved(packed, saved, at, CONFIG.bits)
        amax = find_amax(held)
    else:
        amax = 0.0
        for part in range(i * CONFIG.parts, (i + 1) * CONFIG.parts):
            here = part_at(at, part)
            tiles, saved = SOURCE(operands, here, r, CONFIG)
            store_saved(packed, saved, here, CONFIG.bits)
            amax = accumulate_amax(amax, tiles)
    main, residual, colwise = outputs
    MODE: tl.constexpr = CONFIG.colwise if CONFIG.rowwise is None else CONFIG.rowwise
    scale, inverse = scale_of_codes(amax, MODE)
    if CONFIG.rowwise is not None:
        tl.store(main[1] + offsets[0], scale)
    if CONFIG.colwise is not None:
        tl.store(colwise[1] + offsets[1], scale)
    scaling = amax, scale, inverse
    stored = main[0], colwise[0]
    error, total, sums = _quantize_parts(
        SOURCE, operands, held, scaling, noise, stored, at, CONFIG
    )
    _store_sums(sums, outputs, offsets, CONFIG)
    if CONFIG.criterion is not None:
        CRITERION: tl.constexpr = CONFIG.criterion
        metric = metric_of(scaling, (error, total), CRITERION)
        tl.store(residual[2] + offsets[0], metric)
        residual_scale = 0.0
        limit = tl.load(theta + at[0])
        limit = tl.where(limit >= 0.0, limit, 0.0)
        # The second condition is false where scale * 127 overflows.
        if (metric > limit) & (scale * 127.0 < float("inf")):
            residual_scale = _store_residual(
                SOURCE, operands, scaling, residual[0], at, CONFIG
            )
        tl.store(residual[1] + offsets[0], residual_scale)


@triton.jit
def _quantize_parts(
    SOURCE: tl.constexpr,
    operands,
    held,
    scaling,
    noise,
    stored,
    at,
    CONFIG: tl.constexpr,
):
    """Rounds a block and stores its codes in the requested layouts.

    ``held`` are the tiles of the block, if registers hold them; otherwise ().

    Returns:
      ``sum |x - scale * codes|`` with nearest rounding, and ``sum |x|``, both times
      ``shrink_of(scale)``, each 0 if the criterion does not need it.  And
      ``sum |codes|``, each 0 if it is not requested: the largest of a row, and an upper
      bound of the largest of a column, exact for one part.
    """
    error, total = 0.0, 0.0
    row_sum, column_sum = 0.0, 0.0
    # A loop of one step would take more registers.
    if CONFIG.held:
        error, total, sums = _quantize_part(held, scaling, noise, stored, at, CONFIG)
        row_sum, column_sum = sums
    else:
        r: tl.constexpr = CONFIG.r // CONFIG.parts
        for part in range(at[1] * CONFIG.parts, (at[1] + 1) * CONFIG.parts):
            here = part_at(at, part)
            tiles = SOURCE(operands, here, r, CONFIG)[0]
            part_error, part_total, sums = _quantize_part(
                tiles, scaling, noise, stored, here, CONFIG
            )
            error += part_error
            total += part_total
            row_sum = tl.maximum(row_sum, sums[0])
            column_sum += sums[1]
    return error, total, (row_sum, column_sum)


@triton.jit
def _quantize_part(tiles, scaling, noise, stored, at, CONFIG: tl.constexpr):
    """``_quantize_parts`` of the tiles of one part."""
    _, scale, inverse = scaling
    v = multiply(tiles, inverse)
    ROWWISE: tl.constexpr = CONFIG.rowwise
    COLWISE: tl.constexpr = CONFIG.colwise
    sums = store_rounded(
        stored, v, noise, at, ROWWISE, COLWISE, CONFIG.row_sums, CONFIG.column_sums
    )
    error, total = 0.0, 0.0
    if CONFIG.criterion == "l1" or CONFIG.criterion == "l1_rel":
        error = sum_abs(residual_of(tiles, nearest(v), scale), shrink_of(scale))
    if CONFIG.criterion == "l1_rel":
        total = sum_abs(tiles, shrink_of(scale))
    return error, total, sums


@triton.jit
def store_rounded(
    stored,
    v,
    noise,
    at,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
    ROW_SUMS: tl.constexpr = False,
    COLUMN_SUMS: tl.constexpr = False,
):
    """Rounds values in units of their scale and stores rowwise and colwise codes.

    Returns the largest ``sum |codes|`` of a row and of a column, each 0 if it is not
    requested.
    """
    codes, colwise_codes = stored
    row_sum, column_sum = 0.0, 0.0
    if ROWWISE == "float8":
        store_rowwise(codes, float8(v), at)
    if COLWISE == "float8":
        store_colwise(colwise_codes, float8_words(v), at)
    if ROWWISE == "nearest" or COLWISE == "nearest":
        rounded = nearest(v)
        if ROWWISE == "nearest":
            store_rowwise(codes, rounded, at)
            if ROW_SUMS:
                row_sum = largest_row_sum(rounded)
        if COLWISE == "nearest":
            store_colwise(colwise_codes, rounded, at)
            if COLUMN_SUMS:
                column_sum = largest_column_sum(rounded)
    if ROWWISE == "stochastic" or COLWISE == "stochastic":
        noisy = stochastic(v, noise, at)
        if ROWWISE == "stochastic":
            store_rowwise(codes, noisy, at)
            if ROW_SUMS:
                row_sum = largest_row_sum(noisy)
        if COLWISE == "stochastic":
            store_colwise(colwise_codes, noisy, at)
            if COLUMN_SUMS:
                column_sum = largest_column_sum(noisy)
    return row_sum, column_sum


@triton.jit
def store_empty(outputs, offsets, CONFIG: tl.constexpr):
    """Stores scales, sums and the metric of a block without rows: zeros."""
    main, residual, colwise = outputs
    if CONFIG.rowwise is not None:
        tl.store(main[1] + offsets[0], 0.0)
    if CONFIG.colwise is not None:
        tl.store(colwise[1] + offsets[1], 0.0)
    _store_sums((0.0, 0.0), outputs, offsets, CONFIG)
    if CONFIG.criterion is not None:
        tl.store(residual[1] + offsets[0], 0.0)
        tl.store(residual[2] + offsets[0], 0.0)


@triton.jit
def _store_sums(sums, outputs, offsets, CONFIG: tl.constexpr):
    """Stores the sums of a block's rowwise and colwise codes that are requested."""
    if CONFIG.row_sums:
        tl.store(outputs[0][2] + offsets[0], sums[0])
    if CONFIG.column_sums:
        tl.store(outputs[2][2] + offsets[1], sums[1])


@triton.jit
def _store_residual(
    SOURCE: tl.constexpr, operands, scaling, codes, at, CONFIG: tl.constexpr
):
    """Stores the codes of a block's residual and returns its scale.

    Values are loaded or computed again: keeping them in registers until here would slow
    down every block.
    """
    r: tl.constexpr = CONFIG.r // CONFIG.parts
    i = at[1]
    amax = 0.0
    for part in range(i * CONFIG.parts, (i + 1) * CONFIG.parts):
        tiles = SOURCE(operands, part_at(at, part), r, CONFIG)[0]
        amax = tl.maximum(amax, find_amax(_nearest_residual(tiles, scaling)))
    residual_scale, inverse = scale_and_inverse(amax)
    for part in range(i * CONFIG.parts, (i + 1) * CONFIG.parts):
        here = part_at(at, part)
        tiles = SOURCE(operands, here, r, CONFIG)[0]
        rounded = nearest(multiply(_nearest_residual(tiles, scaling), inverse))
        store_rowwise(codes, rounded, here)
    return residual_scale


@triton.jit
def _nearest_residual(tiles, scaling):
    """The tiles' residual after nearest rounding."""
    _, scale, inverse = scaling
    return residual_of(tiles, nearest(multiply(tiles, inverse)), scale)
