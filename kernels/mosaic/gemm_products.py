"""INT8 products of a few steps on the tensor cores, added to float32 sums."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from fbq_jax.kernels.mosaic.gemm_problem import CONSUMER_ROWS, TILE, Buffers
from fbq_jax.kernels.mosaic.gemm_scheduler import next_stage

ACCUMULATOR = plgpu.ACC((CONSUMER_ROWS, TILE), jnp.int32)


class Sums(NamedTuple):
    """The state that a consumer carries between the steps of a tile.

    Attributes:
      stage: int32, the pipeline stage of the next step.
      values: float32 ``[64, 128]``, the sums so far.
      scales: float32 scalars, the scales of the next ``PREFETCH`` steps.
    """

    stage: jax.Array
    values: jax.Array
    scales: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Products:
    """Multiplies the steps that the producer has copied, with WGMMA.

    Attributes:
      buffers: shared memory and barriers of the thread block.
      num_stages: stages of the pipeline.
      rows: the rows of a tile that this warpgroup multiplies.
    """

    buffers: Buffers
    num_stages: int
    rows: Any

    def add(
        self,
        accumulators: Sequence[Any],
        sums: Sums,
        weights: Sequence[jax.Array],
        to_float: Callable[[jax.Array], jax.Array],
        load_scales: Callable[[], list[jax.Array]],
    ) -> Sums:
        """Adds one step per weight: its product times the weight.

        While one accumulator is promoted, the product of the other is in flight.

        Args:
          accumulators: two int32 accumulators that alternate, or one for one step.
          sums: the sums to add to.
          weights: float32 scalars, one per step.
          to_float: converts the values of an accumulator to float32.
          load_scales: loads the scales of later steps.  It is called where products
            hide its latency.

        Returns:
          The new sums, with the loaded scales.
        """
        stages = [sums.stage]
        for _ in weights:
            stages.append(next_stage(stages[-1], self.num_stages))
        values = sums.values
        self._issue(accumulators[0], stages[0])
        for n, weight in enumerate(weights):
            in_flight = int(n + 1 < len(weights))
            if in_flight:
                self._issue(accumulators[(n + 1) % 2], stages[n + 1])
            if n == 0:
                scales = load_scales()
            product = plgpu.wgmma_accumulator_load(
                accumulators[n % 2], wait_n=in_flight
            )
            plgpu.barrier_arrive(self.buffers.empty.at[stages[n]])
            values += to_float(product) * weight
        return Sums(stages[-1], values, scales)

    def _issue(self, accumulator: Any, stage: jax.Array) -> None:
        """Starts the product of the codes in a stage, once they have arrived."""
        plgpu.barrier_wait(self.buffers.full.at[stage])
        plgpu.wgmma(
            accumulator,
            self.buffers.lhs.at[stage, self.rows],
            self.buffers.rhs.at[stage].transpose((1, 0)),
        )
