"""Products of the codes of steps on the tensor cores, by two warpgroups in turns."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from fbq_jax.kernels.mosaic.gemm_wgmma import start_product

# A product in flight: a function that waits for it and returns values.
Pending = Callable[[], jax.Array]


class ArrivedScales(NamedTuple):
    """Scales that the producer has copied, float32.

    Attributes:
      rows: ``[64]``, of a consumer's rows of lhs in the step that is
        ``Problem.prefetch`` steps later than the codes; None if they have none.
      columns: ``[PART]`` each, of the columns of each part; None if they have none.
    """

    rows: jax.Array | None
    columns: list[jax.Array] | None


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

    def add_to(self, accumulator: Any, stage: jax.Array) -> Pending:
        """Adds the product of a stage's codes to an accumulator, once they arrived."""
        lhs, rhs = self._await_codes(stage, accumulator.shape[1])
        plgpu.wgmma(accumulator, lhs, rhs.transpose((1, 0)))
        self._end_turn()
        return functools.partial(plgpu.wgmma_accumulator_load, accumulator, wait_n=0)

    def start(self, width: int, dtype: Any, stage: jax.Array) -> Pending:
        """Starts the product of a stage's codes, once they arrived."""
        wait = start_product(*self._await_codes(stage, width), dtype)
        self._end_turn()
        return wait

    def finish(self, wait: Pending, stage: jax.Array) -> jax.Array:
        """Waits for the product of a stage; returns values of it or the accumulator."""
        values = wait()
        plgpu.barrier_arrive(self.buffers.empty.at[stage])
        return values

    def _await_codes(self, stage: jax.Array, width: int) -> tuple[Any, Any]:
        """Waits for a stage's codes and for this consumer's turn to multiply them."""
        plgpu.barrier_wait(self.buffers.full.at[stage])
        self._await_turn()
        rows = pl.ds(self.warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)
        columns = pl.ds(0, width)
        return self.buffers.lhs.at[stage, rows], self.buffers.rhs.at[stage, columns]

    def scales(self, stage: jax.Array) -> ArrivedScales:
        """The scales that have arrived with the codes of a stage."""
        rows = columns = None
        if self.buffers.row_scales is not None:
            own = pl.ds(self.warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)
            rows = load_vector(self.buffers.row_scales.at[stage, own], axis=0)
        if self.buffers.column_scales is not None:
            scales = self.buffers.column_scales
            columns = [
                load_vector(scales.at[stage, pl.ds(first, PART)], axis=1)
                for first in range(0, scales.shape[1], PART)
            ]
        if rows is not None:
            plgpu.commit_smem()  # TMA may overwrite what has been read.
        return ArrivedScales(rows, columns)

    def _await_turn(self) -> None:
        plgpu.barrier_wait(self.buffers.turns.at[self.warpgroup])

    def _end_turn(self) -> None:
        plgpu.barrier_arrive(self.buffers.turns.at[CONSUMERS - 1 - self.warpgroup])
