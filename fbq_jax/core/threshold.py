"""The delay threshold (arXiv 2503.08040, Algorithm 2).

A block of an activation falls back if its metric exceeds ``theta``.  ``theta`` is known
before the activation is ("delay"), which saves a second pass over the data.  After each
training forward it moves to keep the fallback rate inside a range.

The paper does not say how far it moves.  Here it moves towards the value that would
have put the rate of the last blocks in the middle of the range, by at most a factor of
``alpha``.  A fixed factor could overshoot the range forever if the blocks' metrics
lie closer together than the factor.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import rounding
from fbq_jax.recipes.schema import Recipe

UNSET = -1.0
"""The value of theta until a forward pass sets it."""


class State(TypedDict):
    """The scalars that a layer carries from one training forward to the next.

    Attributes:
      theta: float32, the threshold of the next forward; ``UNSET`` until it is known.
      rate: float32, the fallback rate of the last training forward.
      count: uint32, the number of training forwards.
      seed: uint32, constant; seeds the noise of each call together with ``count``.
    """

    theta: jax.Array
    rate: jax.Array
    count: jax.Array
    seed: jax.Array


def start(recipe: Recipe, seed: jax.Array | int = 0) -> State:
    """The state before the first training forward."""
    theta = UNSET if recipe.start == "first_batch" else recipe.start
    return canonicalize_state({"theta": theta, "rate": 0, "count": 0, "seed": seed})


def canonicalize_state(state: Mapping[str, Any]) -> State:
    """Converts a state to the dtypes of ``State``; it may be all floats.

    A theta that is not finite and positive becomes ``UNSET``.
    """
    theta = jnp.asarray(state["theta"], jnp.float32)
    return State(
        theta=jnp.where((theta > 0.0) & jnp.isfinite(theta), theta, UNSET),
        rate=jnp.asarray(state["rate"], jnp.float32),
        count=jnp.asarray(state["count"], jnp.uint32),
        seed=jnp.asarray(state["seed"], jnp.uint32),
    )


def call_seed(state: State) -> jax.Array:
    """The seed of the next call's noise, uint32 ``[]``."""
    return rounding.fold(state["seed"], state["count"])


def quantile(
    metric: jax.Array, recipe: Recipe, blocks: jax.Array | None = None
) -> jax.Array:
    """The theta that puts the fallback rate nearest to the middle of its range.

    Args:
      metric: the metric of each block, float32 of any shape.
      recipe: gives the range.
      blocks: the number of blocks, int32 ``[]``, if ``metric`` also has zeros for
        blocks that do not exist; None if every value belongs to a block.

    Returns:
      The metric of one of the blocks, float32 ``[]``.  ``UNSET`` if that is 0 (zeros
      predict nothing), if there is no block, or if a block holds a NaN or an Inf.
    """
    unset = jnp.asarray(UNSET, jnp.float32)
    if not metric.size:
        return unset
    middle = sum(recipe.target_rate) / 2
    above: int | jax.Array = min(round(middle * metric.size), metric.size - 1)
    if blocks is not None:
        above = jnp.round(middle * blocks.astype(jnp.float32)).astype(jnp.int32)
        above = jnp.clip(above, 0, blocks - 1)
    theta = jnp.sort(metric.reshape(-1))[metric.size - 1 - above]
    return jnp.where(jnp.all(jnp.isfinite(metric)) & (theta > 0.0), theta, unset)


def fallback_rate(
    metric: jax.Array, theta: jax.Array, blocks: jax.Array | None = None
) -> jax.Array:
    """The fallback rate: the share of blocks whose metric exceeds theta.

    Args:
      metric: the metric of each block, float32 of any shape.
      theta: float32 ``[]``; ``UNSET`` counts as 0.
      blocks: the number of blocks, as in ``quantile``.

    Returns:
      float32 ``[]``; 0 if there is no block.
    """
    if not metric.size:
        return jnp.zeros((), jnp.float32)
    above = metric > jnp.maximum(theta, 0.0)
    if blocks is None:
        return jnp.mean(above, dtype=jnp.float32)
    total = jnp.maximum(blocks, 1).astype(jnp.float32)
    return jnp.sum(above, dtype=jnp.float32) / total


def update(
    state: State,
    metric: jax.Array,
    theta: jax.Array,
    recipe: Recipe,
    blocks: jax.Array | None = None,
) -> State:
    """The state after a training forward.

    Args:
      state: the state before it.
      metric: the metric of each block of the activation, float32 of any shape.
      theta: the threshold that was used, float32 ``[]``: ``state["theta"]``, or the
        quantile of ``metric`` if that was unset.
      recipe: gives the target range and alpha.
      blocks: the number of blocks, as in ``quantile``.
    """
    rate = fallback_rate(metric, theta, blocks)
    low, high = recipe.target_rate

    def move() -> jax.Array:
        target = quantile(metric, recipe, blocks)
        bounded = jnp.clip(target, theta / recipe.alpha, theta * recipe.alpha)
        return jnp.where((target > 0.0) & (theta > 0.0), bounded, theta)

    outside = (rate < low) | (rate > high)
    return State(
        theta=lax.cond(outside, move, lambda: theta),
        rate=rate,
        count=state["count"] + jnp.uint32(1),
        seed=state["seed"],
    )
