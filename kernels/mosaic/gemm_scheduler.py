"""Assigns output tiles to thread blocks, and lists the steps that each tile sums."""

import dataclasses
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import TILE, Operands, Problem


class Tile(NamedTuple):
    """Coordinates of an output tile, int32: batch index, tile row and tile column."""

    batch: jax.Array
    row: jax.Array
    column: jax.Array


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Assigns tiles to thread blocks, and steps to tiles.

    A *step* multiplies one K block of lhs, or of its residual, with one of rhs.

    Attributes:
      problem: the GEMM.
      operands: references to the operands.
      cluster: int32, index of this thread block's cluster.
      rank: int32, index of this thread block in its cluster.
      num_tiles: int32, number of tiles that this thread block computes.
    """

    problem: Problem
    operands: Operands
    cluster: jax.Array
    rank: jax.Array
    num_tiles: jax.Array

    @classmethod
    def for_this_block(cls, problem: Problem, operands: Operands) -> "Scheduler":
        """The scheduler of the thread block that runs it."""
        cluster, rank = lax.axis_index("cluster"), lax.axis_index("block")
        clusters = problem.num_clusters
        num_tiles = lax.div(
            problem.cluster_tiles - cluster + clusters - 1, jnp.int32(clusters)
        )
        return cls(problem, operands, cluster, rank, num_tiles)

    def tile(self, n: jax.Array) -> Tile:
        """The ``n``-th tile of this thread block; an arbitrary tile after the last."""
        problem = self.problem
        group, cluster = problem.config
        tile_rows, tile_columns = problem.grid
        per_matrix = jnp.int32(tile_rows * tile_columns)
        index = jnp.minimum(
            self.cluster + n * problem.num_clusters, problem.cluster_tiles - 1
        )
        row, column = plgpu.planar_snake(
            lax.rem(index, per_matrix), (tile_rows, tile_columns), 1, group
        )
        return Tile(lax.div(index, per_matrix), row, column * cluster + self.rank)

    def step_counts(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """The number of steps before the outlier steps, and of all steps."""
        if not self.problem.fallback:
            steps = jnp.int32(self.problem.K // TILE)
            return steps, steps
        refs = self.operands
        regular = refs.regular_counts[tile.batch, tile.row]
        return regular, refs.counts[tile.batch, tile.row]

    def step_code(self, tile: Tile, step: jax.Array) -> jax.Array:
        """Twice the K block of a step, plus one if it is a step of the residual."""
        if not self.problem.fallback:
            return 2 * step
        return self.operands.order[tile.batch, tile.row, step]

    def scale(self, tile: Tile, step: int | jax.Array) -> jax.Array:
        """The product of both operands' scales; arbitrary after the last step."""
        refs = self.operands
        k = step
        if self.problem.fallback:
            k = lax.div(refs.order[tile.batch, tile.row, step], jnp.int32(2))
        lhs_scale = refs.lhs_scales[tile.batch, tile.row, step]
        return lhs_scale * refs.rhs_scales[tile.batch, tile.column, k]

    def reset_interval(self, tile: Tile) -> jax.Array:
        """Iterations of the main loop after which the running sums are reset."""
        index = tile.row if self.problem.lhs_bounds_sums else tile.column
        return self.operands.reset_intervals[tile.batch, index]


def next_stage(stage: jax.Array, num_stages: int) -> jax.Array:
    """The pipeline stage of the next step."""
    return jnp.where(stage + 1 == num_stages, 0, stage + 1)
