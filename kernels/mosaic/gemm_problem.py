"""Sizes, options and memory shared by the modules of the Hopper GEMM."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from fbq_jax.kernels.reference import CodeDtype

BLOCK = 128  # rows, columns and elements of K that share a scale
CONSUMERS = 2  # warpgroups that multiply; each computes half the rows of a tile
CONSUMER_ROWS = BLOCK // CONSUMERS
PART = 64  # columns of a tile that lie in one block, and that are stored together
WIDE, NARROW = 192, 128  # columns of a tile
UNROLL = 2  # steps in the body of the main loop
PREFETCH = UNROLL + 1  # steps whose scales are loaded before they are needed
PREFETCH_PAD = PREFETCH  # entries after the last step, loaded but not used
SUM_CHUNK = 128  # sums that a warpgroup loads at once
# Shared memory of a thread block, less what barriers and alignment take.
_SHARED_BYTES = 226 * 1024
_MAX_STAGES = 6
_SCALE_BYTES = 4
# The work of a tile that does not depend on its width, in columns.
_TILE_OVERHEAD = 64
# Each part costs some microseconds.
_MOST_PARTS = 5

RowScales = Literal["none", "lhs", "both"]


class Config(NamedTuple):
    """Tuning options.  They change the speed of the kernel, not its result.

    Attributes:
      group: neighbouring tiles along N that run together, for reuse in the L2 cache.
      wide: columns of tiles that are 192 columns wide, from the left: an even number,
        or at least all.  The other tiles are 128 columns wide.  None chooses the number
        that gives the busiest worker the least work.
    """

    group: int = 8
    wide: int | None = None


class Region(NamedTuple):
    """The columns of the output that have tiles of one width.

    Attributes:
      first_column: the first column, a multiple of ``BLOCK``.
      width: columns of a tile.
      tile_columns: number of tiles along N; the last one may extend beyond N.
      num_tiles: tiles in the region, of all matrices.
    """

    first_column: int
    width: int
    tile_columns: int
    num_tiles: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of one GEMM, from which a kernel is built.

    Attributes:
      batch: number of matrices.
      M: rows of the output, a multiple of ``BLOCK``.
      N: columns of the output, a multiple of ``BLOCK``.
      K: length of the contraction, a multiple of ``BLOCK``.
      fallback: whether lhs has a residual.
      dtype: dtype of the output, with 2 or 4 bytes.
      config: tuning options.
      num_sms: streaming multiprocessors of the GPU.  Tiles are dealt out to as many
        workers.
      num_parts: thread blocks of a worker, which run one after the other; see
        ``in_parts``.
      row_scales: the operands that have a scale for each row and K block, in place of
        one for each block: ``"none"``, ``"lhs"`` or ``"both"``.
      codes: dtype of the codes.
      ordered: whether each product of K blocks is added by itself.
    """

    batch: int
    M: int
    N: int
    K: int
    fallback: bool
    dtype: jnp.dtype
    config: Config
    num_sms: int
    num_parts: int = 1
    row_scales: RowScales = "none"
    codes: CodeDtype = "int8"
    ordered: bool = False

    @functools.cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the output, from the left, in the order of computation."""
        tile_rows, wide = self.batch * self.M // BLOCK, self.config.wide
        if self.row_scales == "both":
            wide = 0  # The scales of 192 columns do not fit into registers.
        if wide is None:
            wide = choose_wide(tile_rows, self.N, self.num_sms)
        return regions(tile_rows, self.N, wide)

    def in_parts(self) -> "Problem":
        """The same GEMM for a program that also runs collectives.

        A collective occupies multiprocessors, and the thread blocks that would run
        there start when it ends or when others end.  If each thread block has all tiles
        of a worker, the GEMM takes up to twice as long.  Here the first one has half of
        these tiles, the next one half of the rest, and so on.
        """
        most_tiles = sum(pl.cdiv(r.num_tiles, self.num_sms) for r in self.regions)
        parts = min(max(1, most_tiles.bit_length()), _MOST_PARTS)
        return dataclasses.replace(self, num_parts=parts)

    @property
    def width(self) -> int:
        """Columns of the widest tile."""
        return max(region.width for region in self.regions)

    @property
    def num_stages(self) -> int:
        """Pipeline stages: as many as fit into shared memory beside the output."""
        out = CONSUMERS * CONSUMER_ROWS * PART * self.dtype.itemsize
        stage = (BLOCK + self.width) * BLOCK
        if self.row_scales != "none":
            stage += BLOCK * _SCALE_BYTES
        if self.row_scales == "both":
            stage += self.width * _SCALE_BYTES
        return min((_SHARED_BYTES - out) // stage, _MAX_STAGES)

    @property
    def running_sums(self) -> bool:
        """Whether accumulators sum several steps, which 16-bit outputs allow.

        The differences of scales that running sums need would cost as much as separate
        sums where every element has a scale of its own.  Sums of FP8 codes would lose
        bits.
        """
        may_sum = self.codes == "int8" and not self.ordered
        return may_sum and self.dtype.itemsize == 2 and self.row_scales != "both"

    @property
    def prefetch(self) -> int:
        """Steps whose scales are loaded before they are needed.

        The differences of running sums need the scales of the steps of an iteration and
        of the next one.  Scales of rows come from shared memory, so one step is enough
        for separate sums of them.
        """
        if self.row_scales == "none" or self.running_sums:
            return PREFETCH
        return 1


def regions(tile_rows: int, N: int, wide: int) -> tuple[Region, ...]:
    """The regions of an output with ``tile_rows`` rows of tiles and ``N`` columns.

    An output of less than 192 columns has no wide tile.
    """
    found, first_column = [], 0
    for width, most in ((WIDE, wide if N >= WIDE else 0), (NARROW, N)):
        tile_columns = min(most, pl.cdiv(max(N - first_column, 0), width))
        num_tiles = tile_rows * tile_columns
        if num_tiles:
            found.append(Region(first_column, width, tile_columns, num_tiles))
        first_column += width * tile_columns
    return tuple(found)


@functools.cache
def choose_wide(tile_rows: int, N: int, num_sms: int) -> int:
    """The ``Config.wide`` that gives the busiest worker the least work."""
    choices = [pl.cdiv(N, WIDE), *range(2 * (N // (2 * WIDE)), -1, -2)]
    return min(choices, key=lambda wide: _most_work(tile_rows, N, wide, num_sms))


def _most_work(tile_rows: int, N: int, wide: int, num_sms: int) -> int:
    """The work of the worker that has most, in columns."""
    work, before = [0] * num_sms, 0
    for region in regions(tile_rows, N, wide):
        for worker in range(num_sms):
            position = (worker - before) % num_sms
            tiles = pl.cdiv(region.num_tiles - position, num_sms)
            work[worker] += tiles * (region.width + _TILE_OVERHEAD)
        before += region.num_tiles
    return max(work)


class Operands(NamedTuple):
    """The operands of the kernel: arrays outside it, references to them inside.

    ``S`` is the length of the step lists: ``2 K/128 + PREFETCH_PAD`` with a residual,
    and ``K/128`` without.

    There are three kinds of GEMMs:

    - A dense one, of B matrices.
    - One whose rows are in groups, each with its own matrix of rhs.  Here B is 1 for
      lhs and the output, and rhs is ``[G, N, K]`` with scales ``[G, N/128, K/128]``.
    - One whose contraction is in groups, with B outputs.  Both operands are in T tiles
      along K, ``[T, M, K/T]`` and ``[T, N, K/T]``, and have scales of one matrix.

    Attributes:
      lhs: int8 or float8_e4m3fn ``[B, M, K]``, codes.
      residual: int8 ``[B, M, K]``, codes of the second term of lhs, or None.
      rows: int32 ``[B, M/128]``, the row of tiles of each step list, or None without
        residual.
      order: int32 ``[B, M/128, S]`` of ``list_steps``, or None without residual.
      lhs_scales: float32 ``[B, M/128, S]``, the scale of lhs in each step; or
        ``[B, S, M]``, the scale of each row; of rows in groups ``[T, S, M/T]``.
      counts: int32 ``[B, M/128]``, number of steps, or None without residual.
      regular_counts: int32 ``[B, M/128]``, number of steps before the outlier steps, or
        None without residual.
      rhs: ``[B, N, K]``, codes of lhs's dtype.
      rhs_scales: float32 ``[B, N/128, K/128]``; or ``[B, K/128, N]``, of each row.
      rhs_sums: float32 ``[n]``, the sums of rhs (``reference.Quantized``), padded to at
        least ``SUM_CHUNK``.  None without running sums.
      groups: int32 ``[M/128]``, the matrix of rhs that each row of tiles multiplies;
        None unless rows are in groups.
      row_range: int32 ``[2]``, the first row of tiles to compute, and their number; the
        others are not written.  None unless rows are in groups.
      step_ranges: int32 ``[B, 2]``, the first K block of each output, and their number;
        None unless the contraction is in groups.
    """

    lhs: Any
    residual: Any
    rows: Any
    order: Any
    lhs_scales: Any
    counts: Any
    regular_counts: Any
    rhs: Any
    rhs_scales: Any
    rhs_sums: Any
    groups: Any = None
    row_range: Any = None
    step_ranges: Any = None


class Buffers(NamedTuple):
    """Shared memory and barriers of a thread block.

    Attributes:
      lhs: codes ``[stages, 128, 128]``, tiles of lhs or of its residual.
      rhs: codes ``[stages, width, 128]``, tiles of rhs, of at most width rows.
      out: ``[CONSUMERS, 64, PART]``, a part of each consumer's output.
      row_scales: float32 ``[stages, 128]``, the scales of the rows of lhs in the step
        that is ``Problem.prefetch`` steps later than the codes; or None.
      column_scales: float32 ``[stages, width]``, the scales of the rows of rhs; or
        None.
      full: barriers, one per stage: the tiles and these scales have arrived.
      empty: barriers, one per stage: all consumers have read both tiles.
      turns: barriers, one per consumer: it may issue its next product.
      sums: float32 ``[CONSUMERS, SUM_CHUNK]``, where each consumer looks for the
        largest of ``rhs_sums``.
    """

    lhs: Any
    rhs: Any
    row_scales: Any
    column_scales: Any
    out: Any
    full: Any
    empty: Any
    turns: Any
    sums: Any


def buffer_types(problem: Problem) -> Buffers:
    """The shared memory and barriers to allocate."""
    stages, dtype = problem.num_stages, problem.dtype

    def codes(rows: int) -> Any:
        shape, code_dtype = (stages, rows, BLOCK), jnp.dtype(problem.codes)
        return plgpu.SMEM(shape, code_dtype, transforms=_swizzle(1))

    def scales(rows: int) -> Any:
        return plgpu.SMEM((stages, rows), jnp.float32)

    out_shape = CONSUMERS, CONSUMER_ROWS, PART
    row_scales = scales(BLOCK) if problem.row_scales != "none" else None
    column_scales = scales(problem.width) if problem.row_scales == "both" else None
    copies = 2 + (row_scales is not None) + (column_scales is not None)
    return Buffers(
        lhs=codes(BLOCK),
        rhs=codes(problem.width),
        row_scales=row_scales,
        column_scales=column_scales,
        out=plgpu.SMEM(out_shape, dtype, transforms=_swizzle(dtype.itemsize)),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        turns=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        sums=plgpu.SMEM((CONSUMERS, SUM_CHUNK), jnp.float32),
    )


def _swizzle(itemsize: int) -> tuple[Any, ...]:
    """The layout of rows of 128 bytes that both TMA and WGMMA read."""
    return plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128)
