"""The producer: copies codes from global to shared memory, ahead of the products."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import BLOCK, Buffers
from fbq_jax.kernels.mosaic.gemm_scheduler import Scheduler, Tile, next_stage


def produce(schedulers: Sequence[Scheduler], buffers: Buffers) -> None:
    """Copies the tiles of all regions, and waits until consumers have read them."""
    stage = jnp.int32(0)
    for scheduler in schedulers:
        stage = Producer(scheduler, buffers).copy_tiles(stage)
    for i in range(schedulers[0].problem.num_stages):
        plgpu.barrier_wait(buffers.empty.at[i])


@dataclasses.dataclass(frozen=True)
class Producer:
    """The warp that issues the TMA copies of a thread block.

    Attributes:
      scheduler: assigns the tiles and steps to copy.
      buffers: shared memory and barriers of the thread block.
    """

    scheduler: Scheduler
    buffers: Buffers

    def copy_tiles(self, stage: jax.Array) -> jax.Array:
        """Copies the steps of all tiles, from ``stage`` on; returns the next stage."""
        return lax.fori_loop(0, self.scheduler.num_tiles, self._copy_tile, stage)

    def _copy_tile(self, n: jax.Array, stage: jax.Array) -> jax.Array:
        tile = self.scheduler.tile(n)
        _, steps = self.scheduler.step_counts(tile)
        return lax.fori_loop(0, steps, functools.partial(self._copy_step, tile), stage)

    def _copy_step(self, tile: Tile, step: jax.Array, stage: jax.Array) -> jax.Array:
        problem, refs = self.scheduler.problem, self.scheduler.operands
        code = self.scheduler.step_code(tile, step)
        k_block = lax.div(code, jnp.int32(2))
        lhs_matrix, rhs_matrix, first = self.scheduler.codes_at(tile, k_block)
        k = pl.ds(first, BLOCK)
        plgpu.barrier_wait(self.buffers.empty.at[stage])

        def copy(
            term: Any, matrix: jax.Array, first_row: jax.Array, rows: int, buffer: Any
        ) -> None:
            plgpu.copy_gmem_to_smem(
                term.at[matrix, pl.ds(first_row, rows), k],
                buffer.at[stage, pl.ds(0, rows)],
                self.buffers.full.at[stage],
            )

        # TMA reads zeros beyond the last row of rhs.
        first_column, width = self.scheduler.first_column(tile), self.scheduler.width
        first_row = tile.row * BLOCK
        copy(refs.rhs, rhs_matrix, first_column, width, self.buffers.rhs)
        copy_lhs = functools.partial(
            copy,
            matrix=lhs_matrix,
            first_row=first_row,
            rows=BLOCK,
            buffer=self.buffers.lhs,
        )
        if problem.fallback:
            is_residual = lax.rem(code, jnp.int32(2))
            pl.when(is_residual == 1)(lambda: copy_lhs(refs.residual))
            pl.when(is_residual == 0)(lambda: copy_lhs(refs.lhs))
        else:
            copy_lhs(refs.lhs)

        def copy_scales(scales: Any, rows: int, buffer: Any) -> None:
            plgpu.copy_gmem_to_smem(
                scales,
                buffer.at[stage, pl.ds(0, rows)],
                self.buffers.full.at[stage],
            )

        if problem.row_scales != "none":
            later = step + problem.prefetch
            scales = self.scheduler.lhs_row_scales(tile, later, first_row, BLOCK)
            copy_scales(scales, BLOCK, self.buffers.row_scales)
        if problem.row_scales == "both":
            _, matrix, now = self.scheduler.scales_at(tile, step)
            scales = refs.rhs_scales.at[matrix, now, pl.ds(first_column, width)]
            copy_scales(scales, width, self.buffers.column_scales)
        return next_stage(stage, problem.num_stages)
