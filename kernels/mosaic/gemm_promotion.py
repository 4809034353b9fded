"""Promotion: how INT32 products become float32 sums.

Step ``t`` adds ``s_t * X_t`` to a tile: ``X_t`` is the INT32 product of 128 codes along
K, and ``s_t`` is the product of both operands' scales.  Promotion executes instructions
for every element in every step, which limits the kernel's speed and costs power.  There
are two ways to promote.

``RunningSums`` needs one FMA per element and step:

- It does not reset an accumulator after a step.  Two accumulators alternate, so the
  running sum is ``P_t = P_{t-2} + X_t``, and the sum of ``s_t * (P_t - P_{t-2})``
  equals the sum of ``(s_t - s_{t+2}) * P_t``.
- It needs no conversion.  An accumulator starts at the bits of the float ``MAGIC``.
  While ``|P| <= 2**22``, its bits are those of the float ``MAGIC + P``.  After
  ``reset_interval`` iterations, before ``P`` can leave this range, the accumulators are
  reset and the contribution of ``MAGIC`` is subtracted.

The rounding error of the sums is about half of the largest ``s_t``.  This is less than
the rounding of the output to 16 bits, with two exceptions.  In a float32 output the
error would be visible.  And an outlier step, whose scale is ``OUTLIER_RATIO`` times the
usual scale of its row of tiles, would hide small values of the rows that share its
block.

``SeparateSums`` handles these exceptions: it starts each accumulator at 0 and converts
each product.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import CONSUMER_ROWS, PREFETCH, TILE, UNROLL
from fbq_jax.kernels.mosaic.gemm_products import ACCUMULATOR, Products, Sums
from fbq_jax.kernels.mosaic.gemm_scheduler import Scheduler, Tile

MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
EXACT_RANGE = 2**22  # largest |P| that the bits of MAGIC + P represent exactly
STEPS_PER_ACCUMULATOR = UNROLL // 2  # in one iteration of the main loop
OUTLIER_RATIO = 16.0


class Work(NamedTuple):
    """A tile with its number of steps, all int32.

    Attributes:
      tile: the tile.
      regular_steps: number of steps before the outlier steps.
      steps: number of all steps.
      reset_interval: iterations of the main loop after which running sums are reset;
        None for an output of 4 bytes.
    """

    tile: Tile
    regular_steps: jax.Array
    steps: jax.Array
    reset_interval: jax.Array | None


@dataclasses.dataclass(frozen=True)
class RunningSums:
    """Adds steps in accumulators that run over many steps."""

    scheduler: Scheduler
    products: Products

    def add_all(self, work: Work, sums: Sums) -> tuple[Sums, jax.Array]:
        """Adds the regular steps, in full iterations of ``UNROLL`` steps.

        Returns:
          The new sums, and the number of steps they include.
        """
        interval = work.reset_interval
        assert interval is not None
        iterations = lax.div(work.regular_steps, jnp.int32(UNROLL))

        def add_interval(n: jax.Array, sums: Sums) -> Sums:
            before = n * interval
            count = jnp.minimum(iterations - before, interval)
            return self._add_interval(work.tile, before * UNROLL, count, sums)

        intervals = pl.cdiv(iterations, interval)
        sums = lax.fori_loop(0, intervals, add_interval, sums)
        return sums, iterations * UNROLL

    def _add_interval(
        self, tile: Tile, first_step: jax.Array, count: jax.Array, sums: Sums
    ) -> Sums:
        """Resets the accumulators, then adds ``count`` iterations of steps."""

        def add(*accumulators: Any) -> Sums:
            for accumulator in accumulators:
                reset(accumulator)
            body = functools.partial(
                self._add_iteration, accumulators, tile, first_step, count
            )
            return lax.fori_loop(0, count, body, sums)

        scale_0, scale_1, *_ = sums.scales
        stage, values, scales = pl.run_scoped(add, ACCUMULATOR, ACCUMULATOR)
        # The weights of an accumulator's steps sum to the scale of its first step.
        return Sums(stage, values - MAGIC * scale_0 - MAGIC * scale_1, scales)

    def _add_iteration(
        self,
        accumulators: Any,
        tile: Tile,
        first_step: jax.Array,
        count: jax.Array,
        n: jax.Array,
        sums: Sums,
    ) -> Sums:
        """Adds ``UNROLL`` steps, weighted by differences of scales."""
        step, kept = first_step + n * UNROLL, sums.scales[UNROLL:]
        weights = running_weights(sums.scales, n + 1 == count)
        load = functools.partial(load_scales, self.scheduler, tile, step, UNROLL)
        sums = self.products.add(accumulators, sums, weights, biased_float, load)
        return sums._replace(scales=[*kept, *sums.scales])


@dataclasses.dataclass(frozen=True)
class SeparateSums:
    """Adds steps in accumulators that start at 0."""

    scheduler: Scheduler
    products: Products

    def add_all(self, work: Work, first_step: jax.Array, sums: Sums) -> Sums:
        """Adds all steps from ``first_step`` on, two at a time."""
        tile, remaining = work.tile, work.steps - first_step

        def add_pair(n: jax.Array, sums: Sums) -> Sums:
            return self._add(2, tile, first_step + 2 * n, sums)

        pairs = lax.div(remaining, jnp.int32(2))
        sums = lax.fori_loop(0, pairs, add_pair, sums)
        add_last = functools.partial(self._add, 1, tile, work.steps - 1)
        is_odd = lax.rem(remaining, jnp.int32(2)) == 1
        return lax.cond(is_odd, add_last, lambda sums: sums, sums)

    def _add(self, count: int, tile: Tile, step: jax.Array, sums: Sums) -> Sums:
        """Adds one or two steps."""
        weights, kept = sums.scales[:count], sums.scales[count:]
        load = functools.partial(load_scales, self.scheduler, tile, step, count)

        def add(*accumulators: Any) -> Sums:
            return self.products.add(accumulators, sums, weights, _convert, load)

        sums = pl.run_scoped(add, *[ACCUMULATOR] * count)
        return sums._replace(scales=[*kept, *sums.scales])


def running_weights(scales: Sequence[jax.Array], is_last: jax.Array) -> list[jax.Array]:
    """The weights ``s_t - s_{t+2}`` of the running sums in an iteration.

    Args:
      scales: float32 scalars, the scales of the iteration's ``UNROLL`` steps and of the
        two steps after them.
      is_last: bool, whether the accumulators are reset after the iteration.  Then the
        last two steps have no next one.
    """
    now, after = scales[:UNROLL], scales[UNROLL:]
    following = [*now[2:], *(jnp.where(is_last, 0.0, scale) for scale in after)]
    return [s - next_s for s, next_s in zip(now, following, strict=True)]


def load_scales(
    scheduler: Scheduler, tile: Tile, step: jax.Array, count: int
) -> list[jax.Array]:
    """Loads the scales of ``count`` steps, starting at ``step + PREFETCH``."""
    later = step + PREFETCH
    return [scheduler.scale(tile, later + n) for n in range(count)]


def reset(accumulator: Any) -> None:
    """Starts an accumulator of running sums."""
    start = jnp.full((CONSUMER_ROWS, TILE), MAGIC_BITS, jnp.int32)
    accumulator[...] = plgpu.layout_cast(start, plgpu.Layout.WGMMA)


def biased_float(accumulator: jax.Array) -> jax.Array:
    """``MAGIC`` plus the running sums, from an accumulator that ``reset`` started."""
    return lax.bitcast_convert_type(accumulator, jnp.float32)


def _convert(accumulator: jax.Array) -> jax.Array:
    return accumulator.astype(jnp.float32)
