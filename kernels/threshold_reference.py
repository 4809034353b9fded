"""The delay threshold (arXiv 2503.08040, Algorithm 2), in ``jax.numpy``.

A block of an activation falls back if its metric exceeds ``theta``.  ``theta`` is known
before the activation is ("delay"), which saves a second pass over the data.  After each
training forward it moves to keep the fallback rate inside a range.

The paper does not say how far it moves.  Here it moves towards the value that would
have put the rate of the last blocks in the middle of the range, by at most a factor of
``alpha``.  A fixed factor could overshoot the range forever if the blocks' metrics
lie closer together than the factor.

The first activation has no earlier one.  So quantization with an unset theta gives all
its blocks a residual, and ``move_threshold`` keeps those that fall back.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

UNSET = -1.0
"""The value of theta until an activation sets it."""


class MovedThreshold(NamedTuple):
    """The result of ``move_threshold`` for ``S`` thresholds.

    Attributes:
      theta: float32 ``[S]``, the threshold in use: the given one, or if that is unset,
        the one that puts the fallback rate nearest to the middle of the range.
      rate: float32 ``[S]``, the fallback rate.
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
    *,
    target_rate: tuple[float, float],
    alpha: float,
) -> MovedThreshold:
    """Sets an unset threshold, measures the fallback rate and moves the threshold.

    It also counts the call, as part of a layer's next state.

    The quantile is the metric of the block that ``above`` blocks exceed.  It sets an
    unset threshold, and the threshold moves towards it if the rate is outside the
    range.  There is no quantile if it is 0 (zeros predict nothing), if there is no
    block, or if a block holds a NaN or an Inf.  Then an unset threshold counts as 0 and
    stays unset, and others do not move.

    Args:
      metric: float32 ``[S, ...]``, the metric of each block, at least 0 or NaN; 0 for
        blocks that do not exist.
      residual_scales: float32 of the same shape, the scales of the residuals.
      theta: float32 ``[S]``, the thresholds; unset if negative or NaN.
      blocks: int32 ``[S]``, the number of blocks that exist.
      above: int32 ``[S]``, the number of blocks in the middle of the range, less than
        ``blocks``.
      count: uint32 ``[S]``, the number of calls before.
      target_rate: the range of the fallback rate, between 0 and 1.
      alpha: the largest factor by which a threshold moves.
    """
    low, high = target_rate
    shape = metric.shape
    metric, residual_scales = (
        x.reshape(shape[0], math.prod(shape[1:])) for x in (metric, residual_scales)
    )
    size = metric.shape[1]
    target = jnp.full(theta.shape, UNSET, jnp.float32)
    if size:
        index = jnp.clip(size - 1 - above, 0, size - 1)[:, None]
        quantile = jnp.take_along_axis(jnp.sort(metric, axis=1), index, axis=1)[:, 0]
        is_usable = jnp.isfinite(metric).all(axis=1) & (quantile > 0.0)
        target = jnp.where(is_usable, quantile, UNSET)
    used = jnp.where(theta >= 0.0, theta, target)
    falls_back = metric > jnp.maximum(used, 0.0)[:, None]
    number = jnp.sum(falls_back, axis=1, dtype=jnp.float32)
    rate = number / jnp.maximum(blocks, 1).astype(jnp.float32)
    bounded = jnp.clip(target, used / alpha, used * alpha)
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
