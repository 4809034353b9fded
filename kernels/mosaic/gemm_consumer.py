"""The consumer: multiplies the codes that the producer copies, and stores tiles."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import (
    BLOCK,
    CONSUMER_ROWS,
    PART,
    PREFETCH,
    Buffers,
)
from fbq_jax.kernels.mosaic.gemm_products import Products
from fbq_jax.kernels.mosaic.gemm_promotion import (
    RunningSums,
    SeparateSums,
    Sums,
    Work,
    reset_interval,
)
from fbq_jax.kernels.mosaic.gemm_scheduler import Scales, Scheduler, Tile


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A warpgroup that computes half the rows of each tile of a thread block.

    Attributes:
      scheduler: assigns the tiles and steps to compute.
      buffers: shared memory and barriers of the thread block.
      out: the output, a reference to ``[B, M, N]``.
      warpgroup: int32, index of this warpgroup.
    """

    scheduler: Scheduler
    buffers: Buffers
    out: Any
    warpgroup: jax.Array

    def run(self) -> None:
        """Computes all tiles of the thread block."""
        for stage in range(self.scheduler.problem.num_stages):
            plgpu.barrier_arrive(self.buffers.empty.at[stage])
        scheduler, products = self.scheduler, Products(self.buffers, self.warpgroup)
        running_sums = None
        if scheduler.problem.running_sums:
            shared = self.buffers.sums.at[self.warpgroup]
            interval = reset_interval(scheduler.operands.rhs_sums, shared)
            running_sums = RunningSums(scheduler, products, interval)
        promotion = running_sums, SeparateSums(scheduler, products)
        products.start_turns()
        start = jnp.int32(0), self._open(jnp.int32(0))
        compute = functools.partial(self._compute_tile, *promotion)
        lax.fori_loop(0, scheduler.num_tiles, compute, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        products.end_turns()

    def _open(self, n: jax.Array) -> tuple[Work, list[Scales]]:
        """The ``n``-th tile, and the scales of its first steps."""
        scheduler = self.scheduler
        tile = scheduler.tile(n)
        work = Work(tile, *scheduler.step_counts(tile))
        return work, [scheduler.scales(tile, step) for step in range(PREFETCH)]

    def _compute_tile(
        self,
        running_sums: RunningSums | None,
        separate_sums: SeparateSums,
        n: jax.Array,
        carry: Any,
    ) -> Any:
        """Computes a tile; ``carry`` is its first stage and the result of ``_open``."""
        stage, (work, scales) = carry
        zeros = jnp.zeros((CONSUMER_ROWS, PART), jnp.float32)
        parts = [
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            for _ in range(self.scheduler.problem.num_parts)
        ]
        sums, done = Sums(stage, parts, scales), jnp.int32(0)
        if running_sums is not None:
            sums, done = running_sums.add_all(work, sums)
        sums = separate_sums.add_all(work, done, sums)
        following = self._open(n + 1)  # The store hides the latency of these loads.
        self._store(work.tile, sums.parts)
        return sums.stage, following

    def _store(self, tile: Tile, parts: list[jax.Array]) -> None:
        """Copies a finished tile, each part after the copy before it has been read."""
        staged = self.buffers.out.at[self.warpgroup]
        first_row = tile.row * BLOCK + self.warpgroup * CONSUMER_ROWS
        first_column = tile.column * self.scheduler.problem.config.width
        for n, part in enumerate(parts):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = part.astype(self.scheduler.problem.dtype)
            plgpu.commit_smem()
            rows = pl.ds(first_row, CONSUMER_ROWS)
            columns = pl.ds(first_column + n * PART, PART)
            # TMA writes nothing beyond the last column.
            plgpu.copy_smem_to_gmem(staged, self.out.at[tile.batch, rows, columns])
