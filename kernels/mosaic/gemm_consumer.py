"""The consumer: multiplies the codes that the producer copies, and stores tiles."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import CONSUMER_ROWS, PREFETCH, TILE, Buffers
from fbq_jax.kernels.mosaic.gemm_products import Products, Sums
from fbq_jax.kernels.mosaic.gemm_promotion import RunningSums, SeparateSums, Work
from fbq_jax.kernels.mosaic.gemm_scheduler import Scheduler, Tile


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A warpgroup that computes half the rows of each tile of a thread block.

    Attributes:
      scheduler: assigns the tiles and steps to compute.
      buffers: shared memory and barriers of the thread block.
      out: the output, a reference to ``[B, M, N]``.
      warpgroup: int32, index of this warpgroup.
      rows: the rows of a tile that this warpgroup computes.
    """

    scheduler: Scheduler
    buffers: Buffers
    out: Any
    warpgroup: jax.Array
    rows: Any

    def run(self) -> None:
        """Computes all tiles of the thread block."""
        for stage in range(self.scheduler.problem.num_stages):
            plgpu.barrier_arrive(self.buffers.empty.at[stage])
        start = jnp.int32(0), self._open(jnp.int32(0))
        lax.fori_loop(0, self.scheduler.num_tiles, self._compute_tile, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _open(self, n: jax.Array) -> tuple[Work, list[jax.Array]]:
        """The ``n``-th tile, and the scales of its first steps."""
        scheduler = self.scheduler
        tile = scheduler.tile(n)
        running = scheduler.problem.running_sums
        reset_interval = scheduler.reset_interval(tile) if running else None
        work = Work(tile, *scheduler.step_counts(tile), reset_interval)
        return work, [scheduler.scale(tile, step) for step in range(PREFETCH)]

    def _compute_tile(self, n: jax.Array, carry: Any) -> Any:
        """Computes a tile; ``carry`` is its first stage and the result of ``_open``."""
        stage, (work, scales) = carry
        scheduler, problem = self.scheduler, self.scheduler.problem
        products = Products(self.buffers, problem.num_stages, self.rows)
        zeros = jnp.zeros((CONSUMER_ROWS, TILE), jnp.float32)
        sums = Sums(stage, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), scales)
        done = jnp.int32(0)
        if problem.running_sums:
            sums, done = RunningSums(scheduler, products).add_all(work, sums)
        sums = SeparateSums(scheduler, products).add_all(work, done, sums)
        following = self._open(n + 1)  # The store hides the latency of these loads.
        self._store(work.tile, sums.values)
        return sums.stage, following

    def _store(self, tile: Tile, values: jax.Array) -> None:
        """Starts to copy a finished tile, after the previous copy has finished."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = self.buffers.out.at[self.warpgroup]
        staged[...] = values.astype(self.scheduler.problem.dtype)
        plgpu.commit_smem()
        first_row = tile.row * TILE + self.warpgroup * CONSUMER_ROWS
        rows, columns = pl.ds(first_row, CONSUMER_ROWS), pl.ds(tile.column * TILE, TILE)
        plgpu.copy_smem_to_gmem(staged, self.out.at[tile.batch, rows, columns])
