"""A layer's delay threshold and its state.

``fbq_jax.kernels.threshold_reference`` defines how the threshold is set and moves.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.kernels import rounding
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.threshold_reference import UNSET
from fbq_jax.recipes.schema import Recipe


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


class Stats(NamedTuple):
    """Measurements of the forward pass.

    Attributes:
      rate: float32 ``[]``, the fallback rate: the share of blocks that fell back.
      theta: float32 ``[]``, the threshold that was used.  ``UNSET``, which counts as 0,
        if none was given and lhs does not determine one (it is zero, or has a NaN or an
        Inf).
      metric: float32 ``[B, ceil(M/m), ceil(K/k)]``, the criterion's value of each
        block.
      next_theta: float32 ``[]``, the threshold of the next call: theta, moved if the
        rate is outside the recipe's range.
    """

    rate: jax.Array
    theta: jax.Array
    metric: jax.Array
    next_theta: jax.Array


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


def next_state(state: State, stats: Stats) -> State:
    """The state after a training forward with these stats."""
    return State(
        theta=stats.next_theta,
        rate=stats.rate,
        count=state["count"] + jnp.uint32(1),
        seed=state["seed"],
    )


def without_fallback(theta: jax.Array, metric: jax.Array) -> Stats:
    """The stats of a call in which no block falls back and theta stays."""
    return Stats(jnp.zeros((), jnp.float32), theta, metric, theta)


def apply(
    theta: jax.Array,
    metric: jax.Array,
    residual: Quantized | None,
    recipe: Recipe,
    *,
    blocks: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[Quantized | None, Stats]:
    """Selects the residuals of blocks that fall back, and moves the threshold.

    Args:
      theta: float32 ``[]``, the threshold that quantized the activation, or ``UNSET``.
      metric: float32, the metric of each block.
      residual: the residuals, whose scales have the shape of ``metric``; None without
        fallback.
      recipe: gives the range of the fallback rate and alpha.
      blocks: the number of blocks, int32 ``[]``, if ``metric`` also has zeros for
        blocks that do not exist; None if every value belongs to a block.
      implementation: as in ``fbq_jax.ops.dispatch.choose``.

    Returns:
      The residual with a scale of 0 for each block that does not fall back; and the
      stats.
    """
    if residual is None:
        return None, without_fallback(theta, metric)
    middle = sum(recipe.target_rate) / 2
    if blocks is None:
        blocks = jnp.int32(metric.size)
        above = jnp.int32(min(round(middle * metric.size), metric.size - 1))
    else:
        above = jnp.round(middle * blocks.astype(jnp.float32)).astype(jnp.int32)
        above = jnp.clip(above, 0, blocks - 1)
    moved = ops.move_threshold(
        metric[None],
        residual.scales[None],
        theta[None],
        blocks[None],
        above[None],
        target_rate=recipe.target_rate,
        alpha=recipe.alpha,
        implementation=implementation,
    )
    used, rate, next_theta = (x.reshape(()) for x in moved[:3])
    residual = residual._replace(scales=moved.residual_scales[0])
    return residual, Stats(rate, used, metric, next_theta)
