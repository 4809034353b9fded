"""The consumer: multiplies the codes that the producer copies, and stores tiles."""

import dataclasses
from collections.abc import Sequence
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
from fbq_jax.kernels.mosaic.gemm_scheduler import (
    Scales,
    Scheduler,
    Tile,
    load_vector,
)


def consume(
    schedulers: Sequence[Scheduler], buffers: Buffers, out: Any, warpgroup: jax.Array
) -> None:
    """Computes half the rows of the tiles of all regions.

    Args:
      schedulers: the thread block's, one for each region.
      buffers: shared memory and barriers of the thread block.
      out: the output, a reference to ``[B, M, N]``.
      warpgroup: int32, index of this warpgroup.
    """
    problem, operands = schedulers[0].problem, schedulers[0].operands
    for i in range(problem.num_stages):
        plgpu.barrier_arrive(buffers.empty.at[i])
    interval = None
    if problem.running_sums:
        interval = reset_interval(operands.rhs_sums, buffers.sums.at[warpgroup])
    products, staged = Products(buffers, warpgroup), buffers.out.at[warpgroup]
    products.start_turns()
    stage = jnp.int32(0)
    for scheduler in schedulers:
        consumer = Consumer(scheduler, products, interval, staged, out)
        stage = consumer.compute_tiles(stage)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    products.end_turns()


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A warpgroup that computes half the rows of each tile of a thread block.

    Attributes:
      scheduler: assigns the tiles and steps to compute.
      products: multiplies the codes of a step.
      interval: the result of ``reset_interval``, or None without running sums.
      staged: shared memory for a part of the output.
      out: the output, a reference to ``[B, M, N]``.
    """

    scheduler: Scheduler
    products: Products
    interval: jax.Array | None
    staged: Any
    out: Any

    def compute_tiles(self, stage: jax.Array) -> jax.Array:
        """Computes all tiles, from ``stage`` on; returns the next stage."""
        start = stage, self._open(jnp.int32(0))
        tiles = self.scheduler.num_tiles
        return lax.fori_loop(0, tiles, self._compute_tile, start)[0]

    def _open(self, n: jax.Array) -> tuple[Work, list[Scales]]:
        """The ``n``-th tile, and the scales of its first steps."""
        scheduler = self.scheduler
        tile = scheduler.tile(n)
        work = Work(tile, *scheduler.step_counts(tile))
        first_steps = range(scheduler.problem.prefetch)
        return work, [self._first_scales(tile, step) for step in first_steps]

    def _first_scales(self, tile: Tile, step: int) -> Scales:
        """The scales of a step that come before all codes of a tile."""
        scheduler = self.scheduler
        if scheduler.problem.row_scales == "none":
            return scheduler.scales(tile, step)
        rows = self._first_row(tile), CONSUMER_ROWS
        lhs_scales = scheduler.lhs_row_scales(tile, step, *rows)
        return scheduler.row_scales(tile, step, load_vector(lhs_scales, 0))

    def _first_row(self, tile: Tile) -> jax.Array:
        """The first row of this warpgroup in a tile."""
        return tile.row * BLOCK + self.products.warpgroup * CONSUMER_ROWS

    def _compute_tile(self, n: jax.Array, carry: Any) -> Any:
        """Computes a tile; ``carry`` is its first stage and the result of ``_open``."""
        stage, (work, scales) = carry
        zeros = jnp.zeros((CONSUMER_ROWS, PART), jnp.float32)
        parts = [
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            for _ in range(self.scheduler.width // PART)
        ]
        sums, done = Sums(stage, parts, scales), jnp.int32(0)
        common = self.scheduler, self.products
        if self.interval is not None:
            sums, done = RunningSums(*common, self.interval).add_all(work, sums)
        sums = SeparateSums(*common).add_all(work, done, sums)
        following = self._open(n + 1)  # The store hides the latency of these loads.
        self._store(work.tile, sums.parts)
        return sums.stage, following

    def _store(self, tile: Tile, parts: list[jax.Array]) -> None:
        """Copies a finished tile, each part after the copy before it has been read."""
        first_row = self._first_row(tile)
        first_column = self.scheduler.first_column(tile)
        for n, part in enumerate(parts):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.staged[...] = part.astype(self.scheduler.problem.dtype)
            plgpu.commit_smem()
            rows = pl.ds(first_row, CONSUMER_ROWS)
            columns = pl.ds(first_column + n * PART, PART)
            # TMA writes nothing beyond the last column.
            target = self.out.at[tile.batch, rows, columns]
            plgpu.copy_smem_to_gmem(self.staged, target)
