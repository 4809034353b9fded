"""Plants outliers in a trained model without changing the function it computes.

In a gated MLP, `down(silu(gate(x)) * up(x))`, a channel of `up` is multiplied by a
power of two, and its row of `down` is divided by it. All products and sums stay the
same bit for bit, but the input of `down` grows in that channel. The chosen channels
have a gate that opens for few tokens, so that the outliers are sparse in both channels
and tokens, as in large models.

In the same way, dividing a channel of `up` and multiplying its row of `down` makes
outliers in the gradient of the output of `up`, and in the weights of `down`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.llama.step import PyTree

CHANNELS = 4  # per layer
_CANDIDATES = 64


class Planted(NamedTuple):
    """A model with outliers.

    Attributes:
        params: The parameters of the model.
        channels: The channels with outliers, int32 [L, CHANNELS].
        factors: The powers of two that multiply `up`, float32 [L, CHANNELS].
    """

    params: PyTree
    channels: jax.Array
    factors: jax.Array


@functools.partial(jax.jit, static_argnums=2)
def plant_gradients(params: PyTree, dy: jax.Array, factor: int) -> Planted:
    """Plants outliers in the gradient of the output of `up`, and in `down`.

    Args:
        params: The parameters of `Llama`.
        dy: This gradient for some text, [L, M, F].
        factor: A power of two by which the gradient grows in the chosen channels.
    """
    dy = jnp.abs(dy.astype(jnp.float32))
    _, channels = jax.lax.top_k(_concentration(dy), CHANNELS)
    factors = jnp.full(channels.shape, jnp.float32(1 / factor))
    return _planted(params, channels, factors)


@jax.jit
def plant(params: PyTree, x: jax.Array, largest: float) -> Planted:
    """Plants outliers.

    Args:
        params: The parameters of `Llama`.
        x: The input of `down` for some text, [L, M, F].
        largest: The target for `max |x|` of each chosen channel on this text, reached
            within a factor of sqrt(2). A channel that is larger already is unchanged.
    """
    x = jnp.abs(x.astype(jnp.float32))
    peak = x.max(axis=1)
    number = min(_CANDIDATES, x.shape[2])
    _, candidates = jax.lax.top_k(_concentration(x), number)
    needed = jnp.log2(largest / jnp.take_along_axis(peak, candidates, axis=1))
    # Choose the candidates that a power of two brings closest to the target.
    # Candidates that are large enough already come last and stay unchanged.
    distance = jnp.where(needed > 0.5, jnp.abs(needed - jnp.round(needed)), jnp.inf)
    needed = jnp.maximum(needed, 0.0)
    _, best = jax.lax.top_k(-distance, CHANNELS)
    channels = jnp.take_along_axis(candidates, best, axis=1)
    powers = jnp.round(jnp.take_along_axis(needed, best, axis=1)).astype(jnp.int32)
    factors = jnp.ldexp(jnp.float32(1.0), powers)  # exp2 is not exact
    return _planted(params, channels, factors)


def _concentration(x: jax.Array) -> jax.Array:
    """How much larger than their mean the channels of magnitudes [L, M, F] get."""
    return x.max(axis=1) / jnp.maximum(x.mean(axis=1), jnp.finfo(jnp.float32).tiny)


def _planted(params: PyTree, channels: jax.Array, factors: jax.Array) -> Planted:
    size = params["layers"]["mlp"]["down"]["kernel"].shape[:2]
    layers = jnp.arange(len(channels))[:, None]
    scale = jnp.ones(size, jnp.float32).at[layers, channels].set(factors)
    return Planted(_rescale(params, scale), channels, factors)


def _rescale(params: PyTree, scale: jax.Array) -> PyTree:
    """Multiplies the channels of `up` by `scale` [L, F]; divides the rows of `down`."""
    mlp = params["layers"]["mlp"]
    gate_up = jnp.asarray(mlp["gate_up"]["kernel"])
    gate_up = gate_up.at[:, :, 1].multiply(scale[:, None])
    down = mlp["down"]["kernel"] / scale[:, :, None]
    mlp = mlp | {"gate_up": {"kernel": gate_up}, "down": {"kernel": down}}
    return params | {"layers": params["layers"] | {"mlp": mlp}}
