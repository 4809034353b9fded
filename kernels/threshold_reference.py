"""The delay threshold (arXiv 2503.08040, Algorithm 2), in ``jax.numpy``.

A block of an activation falls back if its metric exceeds ``theta``.  ``theta`` is known
before the activation is ("delay"), which saves a second pass over the data.  After each
training forward it moves to keep the fallback rate inside a range.

The paper does not say how far it moves.  Here it moves towards the value that would
have put the rate of the last blocks in the middle of the range, by at most a factor of
``alpha``.  A fixed factor could overshoot the range forever if the blocks' metrics
lie closer together than the factor.

Zero blocks never need fallback, and their number says nothing about the others.  So
they do not count: padding and empty slots of experts change neither the threshold nor
the rate of the other blocks.

The first activation has no earlier one.  So quantization with an unset theta gives all
its blocks a residual, and ``move_threshold`` keeps those that fall back.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax.kernels.quantized import UNSET
from fbq_jax.kernels.scales import divide

SMALLEST = 2.0**-126
"""The smallest metric of a block that counts.  Some devices flush smaller ones to 0."""

_INFINITY_BITS = 0x7F800000


class MovedThreshold(NamedTuple):
    """The result of ``move_threshold`` for ``S`` thresholds.

    Attributes:
      theta: float32 ``[S]``, the threshold in use: the given one, or if that is unset,
        the one that puts the fallback rate nearest to the middle of the range, or
        ``UNSET`` if no block counts.
      rate: float32 ``[S]``, the fallback rate: the share of blocks that fall back among
        those that count.
      next_theta: float32 ``[S]``, the threshold of the next activation.
      next_count: uint32 ``[S]``, the number of calls with this one.
      residual_scales: float32 ``[S, ...]``, 0 for blocks that do not fall back.
    """

    theta: jax.Array
    rate: jax.Array
    next_theta: jax.Array
    next_count: jax.Array
    residual_scales: jax.Array


def move_threshold(
    metric: jax.Array,
    residual_scales: jax.Array,
    theta: jax.Array,
    blocks: jax.Array,
    above: jax.Array,
    count: jax.Array,
    rate: jax.Array | None = None,
    *,
    target_rate: tuple[float, float],
    alpha: float,
) -> MovedThreshold:
    """Sets an unset threshold, measures the fallback rate and moves the threshold.

    It also counts the call, as part of a layer's next state.

    Blocks count if they are not zero: if their metric is at least ``SMALLEST``, or NaN.
    The quantile is the metric of the block that ``above`` blocks exceed; fewer, in
    proportion, if some of the ``blocks`` do not count.  If several blocks have this
    very metric, so few others may exceed it that the rate would be below the range.
    Then the float just below it is the quantile if the rate that it gives is nearer to
    the middle.

    The quantile sets an unset threshold, and the threshold moves towards it if the rate
    is outside the range.  There is no quantile if no block counts, or if a block holds
    a NaN or an Inf.  Then an unset threshold counts as 0 and stays unset, and others do
    not move.

    Args:
      metric: float32 ``[S, ...]``, the metric of each block, at least 0 or NaN; 0 for
        blocks that do not exist.
      residual_scales: float32 of the same shape, the scales of the residuals.
      theta: float32 ``[S]``, the thresholds; unset if negative or NaN.
      blocks: int32 ``[S]``, the number of blocks that exist.
      above: int32 ``[S]``, the number of blocks in the middle of the range if all
        ``blocks`` count; less than ``blocks``.
      count: uint32 ``[S]``, the number of calls before.
      rate: float32 ``[S]``, the rates of the calls before.  Results do not depend on
        them, but a kernel may write the new theta, rate and count over these three.
      target_rate: the range of the fallback rate, between 0 and 1.
      alpha: the largest factor by which a threshold moves.
    """
    del rate
    low, high = target_rate
    shape = metric.shape
    metric, residual_scales = (
        x.reshape(shape[0], math.prod(shape[1:])) for x in (metric, residual_scales)
    )
    size = jnp.sum(~(metric < SMALLEST), axis=1, dtype=jnp.int32)  # NaN counts
    target = _quantile(metric, size, _scale_count(above, size, blocks), low)
    used = jnp.where(theta >= 0.0, theta, target)
    falls_back = exceeds(metric, used)
    number = jnp.sum(falls_back, axis=1, dtype=jnp.int32)
    rate = rate_of(number, size)
    # Not a quotient, whose rounding differs between devices.
    bounded = jnp.clip(target, used * np.float32(1.0 / alpha), used * alpha)
    # A factor does not move a threshold away from 0 or from infinity.
    moved = jnp.where((used > 0.0) & (used < jnp.inf), bounded, target)
    is_outside = (rate < low) | (rate > high)
    return MovedThreshold(
        used,
        rate,
        jnp.where(is_outside & (target > 0.0), moved, used),
        count + jnp.uint32(1),
        jnp.where(falls_back, residual_scales, 0.0).reshape(shape),
    )


def exceeds(metric: jax.Array, theta: jax.Array) -> jax.Array:
    """Whether each block of ``metric [S, ...]`` falls back: counts, and exceeds theta.

    An unset theta counts as 0.
    """
    limit = jnp.maximum(theta, 0.0)
    limit = jnp.expand_dims(limit, tuple(range(1, metric.ndim)))
    return (metric > limit) & (metric >= SMALLEST)


def rate_of(number: jax.Array, size: jax.Array) -> jax.Array:
    """The share of ``number`` in ``size``, float32; 0 in none."""

    def on_cpu(number: jax.Array, size: jax.Array) -> jax.Array:
        # A divisor that is no constant to XLA, which would multiply by its inverse.
        divisor = lax.select(number < 0, number, lax.max(size, jnp.full_like(size, 1)))
        return number.astype(jnp.float32) / divisor.astype(jnp.float32)

    def divide_positive(number: jax.Array, size: jax.Array) -> jax.Array:
        some, all_ = (jnp.maximum(x, 1).astype(jnp.float32) for x in (number, size))
        return jnp.where(number > 0, divide(some, all_), 0.0)

    rate: jax.Array = lax.platform_dependent(
        number, size, cpu=on_cpu, default=divide_positive
    )
    return rate


def _scale_count(above: jax.Array, size: jax.Array, blocks: jax.Array) -> jax.Array:
    """``above * size / blocks``, rounded, and less than ``size`` if that is not 0."""
    scaled = jnp.round(above.astype(jnp.float32) * rate_of(size, blocks))
    return jnp.clip(scaled.astype(jnp.int32), 0, jnp.maximum(size - 1, 0))


def _quantile(
    metric: jax.Array, size: jax.Array, above: jax.Array, low: float
) -> jax.Array:
    """The quantile of ``metric [S, N]``, of which ``size`` count; or ``UNSET``."""
    if not metric.shape[1]:
        return jnp.full(metric.shape[:1], UNSET, jnp.float32)
    # As integers, non-negative floats have the same order, with NaN last.
    bits = lax.bitcast_convert_type(jnp.abs(metric), jnp.int32)
    in_order = lax.sort(bits, dimension=1, is_stable=False)
    position = lax.broadcasted_iota(jnp.int32, bits.shape, 1)
    is_found = position == (metric.shape[1] - 1 - above)[:, None]
    found = jnp.sum(jnp.where(is_found, in_order, 0), axis=1, dtype=jnp.int32)
    greater, not_less = (
        jnp.sum(is_above, axis=1, dtype=jnp.int32)
        for is_above in (in_order > found[:, None], in_order >= found[:, None])
    )
    below = (rate_of(greater, size) < low) & (greater + not_less < 2 * above)
    quantile = jnp.maximum(found - below.astype(jnp.int32), 0)
    is_usable = (in_order[:, -1] < _INFINITY_BITS) & (size > 0)
    return jnp.where(is_usable, lax.bitcast_convert_type(quantile, jnp.float32), UNSET)
