"""Products of the codes of steps on the tensor cores, by two warpgroups in turns."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from fbq_jax.kernels.mosaic.gemm_problem import (
    CONSUMER_ROWS,
    CONSUMERS,
    PART,
    Buffers,
)
from fbq_jax.kernels.mosaic.gemm_scheduler import load_vector


@dataclasses.dataclass(frozen=True)
class Products:
    """Multiplies the steps that the producer has copied, with WGMMA.

    The consumers issue their products in turns.  So one of them promotes its product
    while the tensor cores compute the product of the other.

    Attributes:
      buffers: shared memory and barriers of the thread block.
      warpgroup: int32, index of this consumer.
    """

    buffers: Buffers
    warpgroup: jax.Array

    def start_turns(self) -> None:
        """Gives the first turn to consumer 0."""
        pl.when(self.warpgroup == 1)(self._end_turn)

    def end_turns(self) -> None:
        """Takes the last turn, which nobody uses."""
        pl.when(self.warpgroup == 0)(self._await_turn)

    def issue(self, accumulator: Any, stage: jax.Array) -> None:
        """Adds the product of a stage's codes to an accumulator, once they arrived.

        The product is in flight until the accumulator is read.
        """
        rows = pl.ds(self.warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)
        columns = pl.ds(0, accumulator.shape[1])
        plgpu.barrier_wait(self.buffers.full.at[stage])
        self._await_turn()
        plgpu.wgmma(
            accumulator,
            self.buffers.lhs.at[stage, rows],
            self.buffers.rhs.at[stage, columns].transpose((1, 0)),
        )
        self._end_turn()

    def read(self, accumulator: Any, stage: jax.Array) -> jax.Array:
        """Waits for the product of a stage; returns the accumulator's values."""
        values = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
        plgpu.barrier_arrive(self.buffers.empty.at[stage])
        return values

    def row_scales(self, stage: jax.Array) -> jax.Array:
        """The scales of this consumer's rows that arrived with a stage, ``[64]``."""
        rows = pl.ds(self.warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)
        return load_vector(self.buffers.row_scales.at[stage, rows], 0)

    def column_scales(self, stage: jax.Array, part: int) -> jax.Array:
        """The scales of a part's columns that arrived with a stage, ``[PART]``."""
        columns = pl.ds(part * PART, PART)
        return load_vector(self.buffers.column_scales.at[stage, columns], 1)

    def _await_turn(self) -> None:
        plgpu.barrier_wait(self.buffers.turns.at[self.warpgroup])

    def _end_turn(self) -> None:
        plgpu.barrier_arrive(self.buffers.turns.at[CONSUMERS - 1 - self.warpgroup])
