"""The list of steps for the K loop of a GEMM with fallback.

Only some blocks have a residual.  A branch around the product of a residual would keep
the compiler from pipelining the loads.  So the loop over K is a loop over a list of
steps; each step names a K block to multiply, either of lhs or of its residual.

A row block with many residuals has many steps.  If the longest lists come first, thread
blocks that take turns get about the same number of steps.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.triton.launch import launch

CHUNK = 1024  # blocks that a program processes at a time
_TILE = 4096  # blocks of several rows that a program counts at a time


class StepLists(NamedTuple):
    """The steps of each row block; ``S = 2 J + padding`` is the length of a list.

    Attributes:
      rows: int32 ``[B, I]``, the row block of each list.
      order: int32 ``[B, I, S]``: ``2 j`` for K block ``j`` of the first term, and
        ``2 j + 1`` right after it if its residual is used.  ``j`` increases, except
        that outlier steps come last.  0 after the last step.
      scales: float32 ``[B, I, S]``, the scale of each step; 0 after the last step.
      counts: int32 ``[B, I]``, the number of steps.
      regular_counts: int32 ``[B, I]``, the number of steps before the outlier steps.
    """

    rows: jax.Array
    order: jax.Array
    scales: jax.Array
    counts: jax.Array
    regular_counts: jax.Array


def list_steps(
    scales: jax.Array,
    residual_scales: jax.Array,
    *,
    padding: int = 0,
    outlier_ratio: float = math.inf,
    longest_first: bool = False,
) -> StepLists:
    """Lists the products that each row block sums.

    Args:
      scales: float32 ``[B, I, J]``, the scales of the blocks of the first term.
      residual_scales: float32 ``[B, I, J]``.  A residual is used where its scale is not
        0; a NaN is not 0.
      padding: number of entries to append to each list.
      outlier_ratio: a block is an outlier if its scale is more than ``outlier_ratio``
        times the geometric mean of the positive scales of its row block.
      longest_first: whether the longest lists of a matrix come first, instead of the
        row blocks in their order.  Each program then reads all residual scales.
    """
    batch, rows, blocks = scales.shape
    length = 2 * blocks + padding
    chunk = min(CHUNK, triton.next_power_of_2(blocks))
    lists = launch(
        _list_steps,
        scales,
        residual_scales,
        rows,
        blocks,
        outputs=[
            jax.ShapeDtypeStruct((batch, rows), jnp.int32),
            jax.ShapeDtypeStruct((batch, rows, length), jnp.int32),
            jax.ShapeDtypeStruct((batch, rows, length), jnp.float32),
            jax.ShapeDtypeStruct((batch, rows), jnp.int32),
            jax.ShapeDtypeStruct((batch, rows), jnp.int32),
        ],
        grid=(batch * rows,),
        CHUNK=chunk,
        ROWS=min(_TILE // chunk, triton.next_power_of_2(rows)),
        PADDING=padding,
        OUTLIER_RATIO=outlier_ratio,
        LONGEST_FIRST=longest_first,
    )
    return StepLists(*lists)


@triton.jit
def _list_steps(
    scales,
    residual_scales,
    rows,
    blocks,
    list_rows,
    order,
    step_scales,
    counts,
    regular_counts,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PADDING: tl.constexpr,
    OUTLIER_RATIO: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
):
    """One program lists the steps of one row block."""
    row, first_row = tl.program_id(0) % rows, tl.program_id(0) // rows * rows
    position = first_row + row
    if LONGEST_FIRST:
        of_matrix = residual_scales + first_row.to(tl.int64) * blocks
        position = first_row + _rank(of_matrix, row, rows, blocks, CHUNK, ROWS)
    scales += (first_row + row).to(tl.int64) * blocks
    residual_scales += (first_row + row).to(tl.int64) * blocks
    order += position.to(tl.int64) * (2 * blocks + PADDING)
    step_scales += position.to(tl.int64) * (2 * blocks + PADDING)
    limit = _outlier_limit(scales, residual_scales, blocks, CHUNK, OUTLIER_RATIO)
    regular_steps = _count_regular(scales, residual_scales, blocks, limit, CHUNK)
    regular_before, outliers_before, unused_before = 0, regular_steps, 0
    for start in range(0, blocks, CHUNK):
        j = start + tl.arange(0, CHUNK)
        inside = j < blocks
        scale, residual_scale = _load(scales, residual_scales, start, blocks, CHUNK)
        is_outlier, has_residual = scale > limit, residual_scale != 0.0
        own = tl.where(inside, 1 + has_residual.to(tl.int32), 0)
        regular_own = tl.where(is_outlier, 0, own)
        outlier_own = tl.where(is_outlier, own, 0)
        unused = (inside & ~has_residual).to(tl.int32)
        regular_end = regular_before + tl.cumsum(regular_own, 0)
        outlier_end = outliers_before + tl.cumsum(outlier_own, 0)
        unused_end = unused_before + tl.cumsum(unused, 0)
        main = tl.where(is_outlier, outlier_end, regular_end) - own
        tl.store(order + main, 2 * j, inside)
        tl.store(step_scales + main, scale, inside)
        # A block without a residual writes one of the zeros after the last step.
        other = tl.where(has_residual, main + 1, 2 * blocks - unused_end)
        tl.store(order + other, tl.where(has_residual, 2 * j + 1, 0), inside)
        tl.store(step_scales + other, residual_scale, inside)
        regular_before += tl.sum(regular_own, 0)
        outliers_before += tl.sum(outlier_own, 0)
        unused_before += tl.sum(unused, 0)
    for i in tl.static_range(PADDING):
        tl.store(order + 2 * blocks + i, 0)
        tl.store(step_scales + 2 * blocks + i, 0.0)
    tl.store(list_rows + position, row)
    tl.store(regular_counts + position, regular_steps)
    tl.store(counts + position, outliers_before)


@triton.jit
def _rank(residual_scales, row, rows, blocks, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """The number of a matrix's lists that come before the list of a row block."""
    own = tl.sum(_count_residuals(residual_scales, row, 1, rows, blocks, CHUNK), 0)
    before = 0
    for first in range(0, rows, ROWS):
        steps = _count_residuals(residual_scales, first, ROWS, rows, blocks, CHUNK)
        other = first + tl.arange(0, ROWS)
        comes_before = (steps > own) | ((steps == own) & (other < row))
        before += tl.sum((comes_before & (other < rows)).to(tl.int32), 0)
    return before


@triton.jit
def _count_residuals(
    residual_scales, first, ROWS: tl.constexpr, rows, blocks, CHUNK: tl.constexpr
):
    """The numbers of residuals of ``ROWS`` row blocks; 0 after the last one."""
    row = first + tl.arange(0, ROWS)[:, None]
    counted = tl.zeros((ROWS,), tl.int32)
    for start in range(0, blocks, CHUNK):
        j = start + tl.arange(0, CHUNK)[None, :]
        inside = (row < rows) & (j < blocks)
        scale = tl.load(residual_scales + row * blocks + j, inside, 0.0)
        counted += tl.sum((scale != 0.0).to(tl.int32), 1)
    return counted


@triton.jit
def _outlier_limit(
    scales, residual_scales, blocks, CHUNK: tl.constexpr, OUTLIER_RATIO: tl.constexpr
):
    """The scale above which a block is an outlier."""
    logarithms, positive = 0.0, 0.0
    for start in range(0, blocks, CHUNK):
        scale, _ = _load(scales, residual_scales, start, blocks, CHUNK)
        logarithms += tl.sum(tl.where(scale > 0.0, tl.log2(scale), 0.0), 0)
        positive += tl.sum((scale > 0.0).to(tl.float32), 0)
    return OUTLIER_RATIO * tl.exp2(logarithms / tl.maximum(positive, 1.0))


@triton.jit
def _count_regular(scales, residual_scales, blocks, limit, CHUNK: tl.constexpr):
    """The number of steps that are not outlier steps."""
    regular_steps = 0
    for start in range(0, blocks, CHUNK):
        scale, residual_scale = _load(scales, residual_scales, start, blocks, CHUNK)
        is_regular = (start + tl.arange(0, CHUNK) < blocks) & ~(scale > limit)
        has_residual = residual_scale != 0.0
        steps = tl.where(is_regular, 1 + has_residual.to(tl.int32), 0)
        regular_steps += tl.sum(steps, 0)
    return regular_steps


@triton.jit
def _load(scales, residual_scales, start, blocks, CHUNK: tl.constexpr):
    """The scales of ``CHUNK`` blocks and of their residuals, 0 after the last."""
    j = start + tl.arange(0, CHUNK)
    inside = j < blocks
    return tl.load(scales + j, inside, 0.0), tl.load(residual_scales + j, inside, 0.0)
