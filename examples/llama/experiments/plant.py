"""Outliers planted into a trained model, which still computes the same.

In a gated MLP, `down(silu(gate(x)) * up(x))`, a channel of `up` is multiplied by a
power of two and its row of `down` divided by it. Each product and sum is then the same
as before, bit for bit, but the input of `down` is as much larger in that channel. The
channels are those whose gate opens for few tokens, so that the outliers are sparse in
both, as large models' are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.llama.step import PyTree

CHANNELS = 4  # a layer
_CANDIDATES = 64


class Planted(NamedTuple):
    """A model with outliers.

    Attributes:
        params: Its parameters.
        channels: int32 [L, CHANNELS], the channels that have them.
        factors: float32 [L, CHANNELS], the powers of two, from 1 on.
    """

    params: PyTree
    channels: jax.Array
    factors: jax.Array


@jax.jit
def plant(params: PyTree, x: jax.Array, largest: float) -> Planted:
    """Plants outliers.

    Args:
        params: Of `Llama`.
        x: The input of `down`, [L, M, F], for some text.
        largest: What `max |x|` of the channels becomes for this text, within a factor
            of sqrt(2), where it is less before.
    """
    x = jnp.abs(x.astype(jnp.float32))
    peak = x.max(axis=1)
    concentration = peak / jnp.maximum(x.mean(axis=1), jnp.finfo(jnp.float32).tiny)
    number = min(_CANDIDATES, x.shape[2])
    _, candidates = jax.lax.top_k(concentration, number)
    needed = jnp.log2(largest / jnp.take_along_axis(peak, candidates, axis=1))
    # Of the candidates those that a power of two brings closest. What is as large
    # already, and so needs none, comes last and stays as it is.
    distance = jnp.where(needed > 0.5, jnp.abs(needed - jnp.round(needed)), jnp.inf)
    needed = jnp.maximum(needed, 0.0)
    _, best = jax.lax.top_k(-distance, CHANNELS)
    channels = jnp.take_along_axis(candidates, best, axis=1)
    powers = jnp.round(jnp.take_along_axis(needed, best, axis=1)).astype(jnp.int32)
    factors = jnp.ldexp(jnp.float32(1.0), powers)  # exp2 is not exact

    layers = jnp.arange(len(x))[:, None]
    scale = jnp.ones_like(peak).at[layers, channels].set(factors)
    mlp = params["layers"]["mlp"]
    gate_up = jnp.asarray(mlp["gate_up"]["kernel"])
    gate_up = gate_up.at[:, :, 1].multiply(scale[:, None])
    down = mlp["down"]["kernel"] / scale[:, :, None]
    mlp = mlp | {"gate_up": {"kernel": gate_up}, "down": {"kernel": down}}
    params = params | {"layers": params["layers"] | {"mlp": mlp}}
    return Planted(params, channels, factors)
