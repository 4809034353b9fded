"""Promotion: how products of codes become float32 sums.

Step ``t`` adds ``s_t * X_t`` to a tile: ``X_t`` is the INT32 product of 128 codes along
K, and ``s_t`` is the product of both operands' scales.  Promotion executes instructions
for every element in every step, which limits the kernel's speed and costs power.  There
are two ways to promote.

``RunningSums`` needs one FMA per element and step:

- It does not reset the accumulator after a step.  The running sum is
  ``P_t = P_{t-1} + X_t``, and the sum of ``s_t * (P_t - P_{t-1})`` equals the sum of
  ``(s_t - s_{t+1}) * P_t``.
- It needs no conversion.  The accumulator starts at the bits of the float ``MAGIC``.
  While ``|P| <= 2**22``, it holds the bits of the float ``MAGIC + P``.  After
  ``reset_interval`` iterations, before ``P`` can leave this range, the accumulator is
  reset and the contribution of ``MAGIC`` is subtracted.

The rounding error of the sums is about half of the largest ``s_t``.  This is less than
the rounding of the output to 16 bits, with two exceptions.  In a float32 output the
error would be visible.  And an outlier step, whose scale is ``OUTLIER_RATIO`` times the
usual scale of its row of tiles, would hide small values of the rows that share its
block.

``SeparateSums`` handles these exceptions: it starts each product at 0 and converts it.
It also adds products of FP8 codes, which the tensor cores sum in float32 with about 14
bits: no sum there is longer than 128 codes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.mosaic.gemm_problem import (
    BLOCK,
    CONSUMER_ROWS,
    PART,
    SUM_CHUNK,
    UNROLL,
)
from fbq_jax.kernels.mosaic.gemm_products import Pending, Products
from fbq_jax.kernels.mosaic.gemm_scheduler import (
    Scales,
    Scheduler,
    Tile,
    next_stage,
    select,
)

MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
EXACT_RANGE = 2**22  # largest |P| that the bits of MAGIC + P represent exactly
LARGEST_SUM = 127.0 * BLOCK  # of the magnitudes of the codes of a step
OUTLIER_RATIO = 16.0


class Work(NamedTuple):
    """A tile with its number of steps, all int32.

    Attributes:
      tile: the tile.
      regular_steps: number of steps before the outlier steps.
      steps: number of all steps.
    """

    tile: Tile
    regular_steps: jax.Array
    steps: jax.Array


class Sums(NamedTuple):
    """The state that a consumer carries between the steps of a tile.

    Attributes:
      stage: int32, the pipeline stage of the next step.
      parts: float32 ``[64, PART]`` each, the sums so far.
      scales: the scales of the next ``Problem.prefetch`` steps.
    """

    stage: jax.Array
    parts: list[jax.Array]
    scales: list[Scales]


@dataclasses.dataclass(frozen=True)
class _Promotion:
    """What both ways to promote have in common."""

    scheduler: Scheduler
    products: Products

    def add_step(
        self,
        issue: Callable[[jax.Array], Pending],
        tile: Tile,
        sums: Sums,
        weights: Scales,
        to_float: Callable[[jax.Array], jax.Array],
        load_scales: Callable[[jax.Array | None], list[Scales]],
    ) -> Sums:
        """Multiplies one step, and adds what ``issue`` returns times the weights.

        While the product is in flight, ``load_scales`` loads the scales of later steps,
        given the scales of lhs that have arrived with the codes.
        """
        pending = issue(sums.stage)
        arrived = self.products.scales(sums.stage)
        loaded, columns = load_scales(arrived.rows), arrived.columns or []
        values = self.products.finish(pending, sums.stage)
        spread = itertools.zip_longest(self.scheduler.per_part(tile, weights), columns)
        parts = [
            part + to_float(values[:, n * PART : (n + 1) * PART]) * _spread(*weight)
            for n, (part, weight) in enumerate(zip(sums.parts, spread, strict=True))
        ]
        stage = next_stage(sums.stage, self.scheduler.problem.num_stages)
        return Sums(stage, parts, [*sums.scales, *loaded])

    def load_scales(
        self, tile: Tile, step: jax.Array, count: int, rows: jax.Array | None
    ) -> list[Scales]:
        """Loads the scales of ``count`` steps, or of one whose scales of lhs are given.

        The first one is ``Problem.prefetch`` steps after ``step``.
        """
        later = step + self.scheduler.problem.prefetch
        if rows is not None:
            return [self.scheduler.row_scales(tile, later, rows)]
        return [self.scheduler.scales(tile, later + n) for n in range(count)]


@dataclasses.dataclass(frozen=True)
class RunningSums(_Promotion):
    """Adds steps in an accumulator that runs over many steps.

    Attributes:
      reset_interval: int32, iterations of the main loop after which the accumulator is
        reset.
    """

    reset_interval: jax.Array

    def add_all(self, work: Work, sums: Sums) -> tuple[Sums, jax.Array]:
        """Adds the regular steps, in full iterations of ``UNROLL`` steps.

        Returns:
          The new sums, and the number of steps they include.
        """
        interval = self.reset_interval
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
        """Resets the accumulator, then adds ``count`` iterations of steps."""

        def add(accumulator: Any) -> Sums:
            def add_iteration(n: jax.Array, sums: Sums) -> Sums:
                step, is_last = first_step + n * UNROLL, n + 1 == count
                return self._add_iteration(accumulator, tile, step, is_last, sums)

            reset(accumulator)
            return lax.fori_loop(0, count, add_iteration, sums)

        # The weights of an interval's steps sum to the scale of its first step.
        first = self.scheduler.per_part(tile, sums.scales[0])
        sums = pl.run_scoped(add, _accumulator(self.scheduler.width))
        pairs = zip(sums.parts, first, strict=True)
        parts = [part - _spread(MAGIC * scale) for part, scale in pairs]
        return sums._replace(parts=parts)

    def _add_iteration(
        self,
        accumulator: Any,
        tile: Tile,
        step: jax.Array,
        is_last: jax.Array,
        sums: Sums,
    ) -> Sums:
        """Adds ``UNROLL`` steps, weighted by differences of scales."""
        steps = running_weights(sums.scales, is_last)
        sums = sums._replace(scales=sums.scales[UNROLL:])
        issue = functools.partial(self.products.add_to, accumulator)
        for n, weights in enumerate(steps):
            # Those in global memory are loaded together, so that all arrive in time.
            count = 0 if n else UNROLL
            load = functools.partial(self.load_scales, tile, step + n, count)
            sums = self.add_step(issue, tile, sums, weights, biased_float, load)
        return sums


@dataclasses.dataclass(frozen=True)
class SeparateSums(_Promotion):
    """Adds products that start at 0."""

    def add_all(self, work: Work, first_step: jax.Array, sums: Sums) -> Sums:
        """Adds all steps from ``first_step`` on."""
        add = functools.partial(self._add_one, work.tile)

        def add_iteration(n: jax.Array, sums: Sums) -> Sums:
            for step in range(UNROLL):
                sums = add(first_step + n * UNROLL + step, sums)
            return sums

        done = first_step
        if self.scheduler.problem.prefetch < UNROLL:  # There are registers for it.
            iterations = lax.div(work.steps - first_step, jnp.int32(UNROLL))
            sums = lax.fori_loop(0, iterations, add_iteration, sums)
            done = first_step + iterations * UNROLL
        return lax.fori_loop(done, work.steps, add, sums)

    def _add_one(self, tile: Tile, step: jax.Array, sums: Sums) -> Sums:
        scales, *kept = sums.scales
        sums = sums._replace(scales=kept)
        load = functools.partial(self.load_scales, tile, step, 1)
        problem, width = self.scheduler.problem, self.scheduler.width
        dtype = jnp.int32 if problem.codes == "int8" else jnp.float32
        issue = functools.partial(self.products.start, width, dtype)
        return self.add_step(issue, tile, sums, scales, _convert, load)


def _spread(weight: jax.Array, columns: jax.Array | None = None) -> jax.Array:
    """Broadcasts weights of rows, and of columns if given, to a part of a tile."""
    if not weight.ndim:
        return weight
    shape = CONSUMER_ROWS, PART
    spread = lax.broadcast_in_dim(weight, shape, (0,))
    if columns is None:
        return spread
    return spread * lax.broadcast_in_dim(columns, shape, (1,))


def running_weights(scales: Sequence[Scales], is_last: jax.Array) -> list[Scales]:
    """The weights ``s_t - s_{t+1}`` of the running sums in an iteration.

    Args:
      scales: the scales of the iteration's ``UNROLL`` steps and of the step after them.
      is_last: bool, whether the accumulator is reset after the iteration.  Then the
        last step has no next one.
    """
    end = Scales(
        *(select(is_last, jnp.zeros_like(scale), scale) for scale in scales[UNROLL])
    )
    following = [*scales[1:UNROLL], end]
    return [
        Scales(now.first - after.first, now.last - after.last)
        for now, after in zip(scales[:UNROLL], following, strict=True)
    ]


def reset_interval(rhs_sums: Any, shared: Any) -> jax.Array:
    """Iterations of the main loop for which running sums stay in ``EXACT_RANGE``.

    No code of lhs exceeds 127, so a product of 128 codes is at most 127 times the
    largest ``sum |codes|`` of rhs.  The sums may be of longer rows, or NaN for a block
    with a NaN; 128 codes do not exceed ``LARGEST_SUM``.

    Args:
      rhs_sums: a reference to ``Operands.rhs_sums``.
      shared: float32 ``[SUM_CHUNK]``, shared memory of this warpgroup.
    """
    last = rhs_sums.shape[0] - SUM_CHUNK

    def take(n: jax.Array, largest: jax.Array) -> jax.Array:
        start = jnp.minimum(n * SUM_CHUNK, last)  # The last chunks may overlap.
        return jnp.maximum(largest, rhs_sums[pl.ds(start, SUM_CHUNK)])

    chunks = pl.cdiv(rhs_sums.shape[0], SUM_CHUNK)
    shared[...] = lax.fori_loop(1, chunks, take, rhs_sums[pl.ds(0, SUM_CHUNK)])
    plgpu.commit_smem()
    largest = lax.fori_loop(
        0, SUM_CHUNK, lambda n, x: jnp.maximum(x, shared[n]), jnp.float32(1), unroll=16
    )
    largest = jnp.where(largest <= LARGEST_SUM, largest, LARGEST_SUM)
    # All these are integers below 2**24, so only the division rounds.
    return (EXACT_RANGE / (UNROLL * 127.0 * largest)).astype(jnp.int32)


def _accumulator(width: int) -> Any:
    return plgpu.ACC((CONSUMER_ROWS, width), jnp.int32)


def reset(accumulator: Any) -> None:
    """Starts an accumulator of running sums."""
    start = jnp.full(accumulator.shape, MAGIC_BITS, jnp.int32)
    accumulator[...] = plgpu.layout_cast(start, plgpu.Layout.WGMMA)


def biased_float(accumulator: jax.Array) -> jax.Array:
    """``MAGIC`` plus the running sums, from an accumulator that ``reset`` started."""
    return lax.bitcast_convert_type(accumulator, jnp.float32)


def _convert(accumulator: jax.Array) -> jax.Array:
    return accumulator.astype(jnp.float32)
