"""The producer: copies codes from global to shared memory, ahead of the products."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import TILE, Buffers
from fbq_jax.kernels.mosaic.gemm_scheduler import Scheduler, Tile, next_stage


@dataclasses.dataclass(frozen=True)
class Producer:
    """The warpgroup that issues the TMA copies of a thread block.

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
        code = self.scheduler.step_code(tile, step)
        k = pl.ds(lax.div(code, jnp.int32(2)) * TILE, TILE)
        plgpu.barrier_wait(self.buffers.empty.at[stage])
        plgpu.copy_gmem_to_smem(
            self.scheduler.operands.rhs.at[tile.batch, _rows(tile.column), k],
            self.buffers.rhs.at[stage],
            self.buffers.full.at[stage],
        )
        self._copy_lhs(code, (tile.batch, _rows(tile.row), k), stage)
        return next_stage(stage, self.scheduler.problem.num_stages)

    def _copy_lhs(self, code: jax.Array, index: Any, stage: jax.Array) -> None:
        """Copies a tile of lhs or of its residual to all blocks of the cluster."""
        problem, refs = self.scheduler.problem, self.scheduler.operands
        multicast: Any = (
            {"collective_axes": "block"} if problem.config.cluster > 1 else {}
        )

        def copy(term: Any) -> None:
            plgpu.copy_gmem_to_smem(
                term.at[index],
                self.buffers.lhs.at[stage],
                self.buffers.full.at[stage],
                **multicast,
            )

        if problem.fallback:
            is_residual = lax.rem(code, jnp.int32(2)) == 1
            pl.when(is_residual)(lambda: copy(refs.residual))
            pl.when(~is_residual)(lambda: copy(refs.lhs))
        else:
            copy(refs.lhs)


def _rows(tile_index: jax.Array) -> Any:
    return pl.ds(tile_index * TILE, TILE)
