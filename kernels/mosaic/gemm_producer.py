"""The producer: copies codes from global to shared memory, ahead of the products."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import BLOCK, Buffers
from fbq_jax.kernels.mosaic.gemm_scheduler import Scheduler, Tile, next_stage


@dataclasses.dataclass(frozen=True)
class Producer:
    """The warp that issues the TMA copies of a thread block.

    Attributes:
      scheduler: assigns the tiles and steps to copy.
      buffers: shared memory and barriers of the thread block.
    """

    scheduler: Scheduler
    buffers: Buffers

    def run(self) -> None:
        """Copies the steps of all tiles, and waits until consumers have read them."""
        tiles = self.scheduler.num_tiles
        lax.fori_loop(0, tiles, self._copy_tile, jnp.int32(0))
        for stage in range(self.scheduler.problem.num_stages):
            plgpu.barrier_wait(self.buffers.empty.at[stage])

    def _copy_tile(self, n: jax.Array, stage: jax.Array) -> jax.Array:
        tile = self.scheduler.tile(n)
        _, steps = self.scheduler.step_counts(tile)
        return lax.fori_loop(0, steps, functools.partial(self._copy_step, tile), stage)

    def _copy_step(self, tile: Tile, step: jax.Array, stage: jax.Array) -> jax.Array:
        problem, refs = self.scheduler.problem, self.scheduler.operands
        code = self.scheduler.step_code(tile, step)
        k = pl.ds(lax.div(code, jnp.int32(2)) * BLOCK, BLOCK)
        plgpu.barrier_wait(self.buffers.empty.at[stage])

        def copy(term: Any, first_row: jax.Array, buffer: Any) -> None:
            rows = pl.ds(first_row, buffer.shape[1])
            plgpu.copy_gmem_to_smem(
                term.at[tile.batch, rows, k],
                buffer.at[stage],
                self.buffers.full.at[stage],
            )

        # TMA reads zeros beyond the last row of rhs.
        copy(refs.rhs, tile.column * problem.config.width, self.buffers.rhs)
        copy_lhs = functools.partial(
            copy, first_row=tile.row * BLOCK, buffer=self.buffers.lhs
        )
        if problem.fallback:
            is_residual = lax.rem(code, jnp.int32(2))
            pl.when(is_residual == 1)(lambda: copy_lhs(refs.residual))
            pl.when(is_residual == 0)(lambda: copy_lhs(refs.lhs))
        else:
            copy_lhs(refs.lhs)
        return next_stage(stage, problem.num_stages)
