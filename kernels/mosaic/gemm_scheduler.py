"""Assigns output tiles to thread blocks, and lists the steps that each tile sums."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import (
    BLOCK,
    Operands,
    Problem,
    Region,
)


class Tile(NamedTuple):
    """Coordinates of an output tile, int32.

    Attributes:
      batch: index of the matrix.
      row: index of its row of tiles.
      steps: index of its step list, or of its row of tiles without a residual.
      column: index of its column of tiles in the region.
      rhs: index of the matrix of rhs, if rows are in groups; otherwise None.
      first_block: the first K block, if the contraction is in groups; otherwise None.
    """

    batch: jax.Array
    row: jax.Array
    steps: jax.Array
    column: jax.Array
    rhs: jax.Array | None = None
    first_block: jax.Array | None = None

    @property
    def rhs_matrix(self) -> jax.Array:
        """Index of the matrix of rhs."""
        return self.batch if self.rhs is None else self.rhs


class Scales(NamedTuple):
    """The scales of one step in a tile: products of both operands' scales.

    They are float32 ``[]``, or ``[64]`` if each row of lhs has its own.  If each row of
    rhs does, too, they are the scales of lhs alone.

    Attributes:
      first: of the tile's first block of columns.
      last: of its last block of columns.
    """

    first: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Assigns the tiles of a region to thread blocks, and steps to tiles.

    A *step* multiplies one K block of lhs, or of its residual, with one of rhs.

    Attributes:
      problem: the GEMM.
      region: the columns of the output.
      operands: references to the operands.
      tile_rows: rows of tiles of a matrix: a number, or int32 if rows are in groups.
      first_tile: int32, index of this thread block's first tile in the region.
      num_tiles: int32, number of tiles that this thread block computes.
    """

    problem: Problem
    region: Region
    operands: Operands
    tile_rows: int | jax.Array
    first_tile: jax.Array
    num_tiles: jax.Array

    @classmethod
    def for_this_block(
        cls, problem: Problem, operands: Operands
    ) -> tuple["Scheduler", ...]:
        """The schedulers of the regions for the thread block that runs it.

        The tiles are dealt out to workers, one for each multiprocessor.  A worker is a
        thread block, or several, one after the other (``Problem.in_parts``).  The
        workers that have a tile less in a region come first in the next one.
        """
        block, workers = lax.axis_index("thread_block"), jnp.int32(problem.num_sms)
        worker, part = lax.rem(block, workers), lax.div(block, workers)
        tile_rows: int | jax.Array = problem.M // BLOCK
        if operands.row_range is not None:
            tile_rows = operands.row_range[1]
        rows = problem.batch * tile_rows
        num_tiles = [rows * region.tile_columns for region in problem.regions]
        rounds = [lax.div(n + workers - 1, workers) for n in num_tiles]
        start, end = _part_of(sum(rounds[1:], rounds[0]), part, problem.num_parts)
        schedulers, before = [], jnp.int32(0)
        for region, tiles, of_region in zip(
            problem.regions, num_tiles, rounds, strict=True
        ):
            first = lax.rem(worker + (workers - lax.rem(before, workers)), workers)
            of_worker = lax.div(tiles - first + workers - 1, workers)
            skipped = jnp.minimum(jnp.maximum(start, 0), of_worker)
            count = jnp.minimum(jnp.maximum(end, 0), of_worker) - skipped
            first += skipped * workers
            schedulers.append(cls(problem, region, operands, tile_rows, first, count))
            start, end, before = start - of_region, end - of_region, before + tiles
        return tuple(schedulers)

    def tile(self, n: jax.Array) -> Tile:
        """The ``n``-th tile of this thread block; an arbitrary tile after the last."""
        region, refs = self.region, self.operands
        index = self.first_tile + n * self.problem.num_sms
        if refs.row_range is not None:
            last = jnp.maximum(self.tile_rows * region.tile_columns - 1, 0)
            row, column = self._locate(jnp.minimum(index, last))
            row += refs.row_range[0]
            return Tile(jnp.int32(0), row, row, column, rhs=refs.groups[row])
        index = jnp.minimum(index, region.num_tiles - 1)
        tiles_per_matrix = jnp.int32(region.num_tiles // self.problem.batch)
        steps, column = self._locate(lax.rem(index, tiles_per_matrix))
        batch = lax.div(index, tiles_per_matrix)
        row = refs.rows[batch, steps] if self.problem.fallback else steps
        tile = Tile(batch, row, steps, column)
        if refs.step_ranges is not None:
            tile = tile._replace(first_block=refs.step_ranges[tile.batch, 0])
        return tile

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.region.width

    def first_column(self, tile: Tile) -> jax.Array:
        """The first column of a tile in the output."""
        return self.region.first_column + tile.column * self.width

    def _locate(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row and column of a tile of a matrix.

        Tiles are visited in groups of columns, down one group and up the next, so that
        tiles that run at the same time share rows of both operands in the L2 cache.
        (``plgpu.planar_snake`` does not do: in some versions of JAX, it uses primitives
        that the producer's warp does not support.)
        """
        tile_rows, tile_columns = self.tile_rows, self.region.tile_columns
        if self.operands.row_range is not None:
            tile_rows = jnp.maximum(tile_rows, 1)
        group = lax.div(index, jnp.int32(tile_rows * self.problem.config.group))
        first_column = group * self.problem.config.group
        width = jnp.minimum(self.problem.config.group, tile_columns - first_column)
        index = index - first_column * tile_rows
        row, column = lax.div(index, width), lax.rem(index, width)
        column = jnp.where(lax.rem(row, jnp.int32(2)) == 1, width - 1 - column, column)
        row = jnp.where(lax.rem(group, jnp.int32(2)) == 1, tile_rows - 1 - row, row)
        return row, first_column + column

    def step_counts(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """The number of steps before the outlier steps, and of all steps."""
        refs = self.operands
        if not self.problem.fallback:
            steps = jnp.int32(self.problem.K // BLOCK)
            if refs.step_ranges is not None:
                steps = refs.step_ranges[tile.batch, 1]
            return steps, steps
        regular = refs.regular_counts[tile.batch, tile.steps]
        return regular, refs.counts[tile.batch, tile.steps]

    def step_code(self, tile: Tile, step: jax.Array) -> jax.Array:
        """Twice the K block of a step, plus one if it is a step of the residual."""
        if not self.problem.fallback:
            return 2 * step
        return self.operands.order[tile.batch, tile.steps, step]

    def codes_at(
        self, tile: Tile, k_block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The matrices of lhs and of rhs with a K block's codes, and its first one."""
        if tile.first_block is None:
            return tile.batch, tile.rhs_matrix, k_block * BLOCK
        k_block += tile.first_block
        blocks = jnp.int32(self.operands.lhs.shape[2] // BLOCK)
        matrix = lax.div(k_block, blocks)
        return matrix, matrix, lax.rem(k_block, blocks) * BLOCK

    def scales_at(self, tile: Tile, step: Any) -> tuple[jax.Array, jax.Array, Any]:
        """The matrices of lhs and of rhs with a step's scales, and their K block.

        There is no residual.  A step after the last one has the last K block.
        """
        lhs, rhs = tile.batch, tile.rhs_matrix
        if tile.first_block is not None:
            lhs = rhs = jnp.int32(0)
            step += tile.first_block
        last = self.problem.K // BLOCK - 1
        k = min(step, last) if isinstance(step, int) else jnp.minimum(step, last)
        return lhs, rhs, k

    def scales(self, tile: Tile, step: int | jax.Array) -> Scales:
        """The scales of a step; arbitrary after the last step."""
        refs = self.operands
        if self.problem.fallback:
            batch, rhs = tile.batch, tile.rhs_matrix
            k: Any = lax.div(refs.order[batch, tile.steps, step], jnp.int32(2))
        else:
            batch, rhs, k = self.scales_at(tile, step)
            step = k
        return self._times_rhs(tile, refs.lhs_scales[batch, tile.steps, step], rhs, k)

    def lhs_row_scales(
        self, tile: Tile, step: int | jax.Array, first_row: jax.Array, rows: int
    ) -> Any:
        """A reference to a step's scales of ``rows`` rows of lhs, all in one tile."""
        matrix, _, k = self.scales_at(tile, step)
        scales = self.operands.lhs_scales
        if self.operands.row_range is not None:
            height = jnp.int32(scales.shape[2])
            matrix, first_row = lax.div(first_row, height), lax.rem(first_row, height)
        return scales.at[matrix, k, pl.ds(first_row, rows)]

    def row_scales(self, tile: Tile, step: int | jax.Array, lhs: jax.Array) -> Scales:
        """The scales of a step with these of rows of lhs; arbitrary after the last."""
        if self.problem.row_scales == "both":
            return Scales(lhs, lhs)
        _, rhs, k = self.scales_at(tile, step)
        return self._times_rhs(tile, lhs, rhs, k)

    def _times_rhs(
        self, tile: Tile, lhs: jax.Array, matrix: jax.Array, k: Any
    ) -> Scales:
        """The scales of lhs times the scales of a matrix of rhs in K block k."""
        rhs_scales = self.operands.rhs_scales
        first = lax.div(self.first_column(tile), jnp.int32(BLOCK))
        first_scale = lhs * rhs_scales[matrix, first, k]
        if self.width == BLOCK:
            return Scales(first_scale, first_scale)
        last = jnp.minimum(first + 1, self.problem.N // BLOCK - 1)
        return Scales(first_scale, lhs * rhs_scales[matrix, last, k])

    def per_part(self, tile: Tile, scales: Scales) -> list[jax.Array]:
        """The scale of each part of a tile: a tile of 192 columns has 1.5 blocks."""
        if self.width == BLOCK:
            return [scales.first, scales.first]
        starts_in_block = lax.rem(tile.column, jnp.int32(2)) == 1
        middle = select(starts_in_block, scales.last, scales.first)
        return [scales.first, middle, scales.last]


def _part_of(
    tiles: jax.Array, part: jax.Array, num_parts: int
) -> tuple[jax.Array, jax.Array]:
    """The start and the end of a part of a worker's tiles.

    Each part is half of the tiles that the parts before it leave, and the last part is
    all of them.
    """
    start = tiles - lax.shift_right_logical(tiles, part)
    end = tiles - lax.shift_right_logical(tiles, part + 1)
    return start, jnp.where(part == num_parts - 1, tiles, end)


def load_vector(values: Any, axis: int) -> jax.Array:
    """Loads a vector along an axis of the accumulator, without Mosaic's fast paths."""
    # The index was a required argument, before it was deprecated.
    index = () if jax.__version_info__ >= (0, 11) else (None,)
    loaded = plgpu.load(values, *index, optimized=False)
    return plgpu.layout_cast(loaded, plgpu.Layout.WGMMA.reduce(1 - axis))


def select(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """``jnp.where`` of a scalar condition, which Mosaic does not broadcast."""
    return jnp.where(lax.broadcast(condition, x.shape), x, y)


def next_stage(stage: jax.Array, num_stages: int) -> jax.Array:
    """The pipeline stage of the next step."""
    return jnp.where(stage + 1 == num_stages, 0, stage + 1)
