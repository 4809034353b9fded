"""Outliers planted into a trained model, which still computes the same.

The models are 128 channels wider in their gated MLPs, `down(silu(gate(x)) * up(x))`,
than the one that was trained; the channels that are added are zero. The input of `down`
gets its outliers in either of two ways, from channels whose gate opens for few tokens,
so that they are sparse in both, as large models' are:

*Divided*: such a channel of `up` is multiplied by a power of two, and its row of `down`
divided by it. Each product and sum is as before, bit for bit. But the row that is left
is so small that INT8 may round it off beside its block's, column's or tensor's others.

*In pairs*: two of the new channels have the gate of such a channel, its `up` times a
power of two, and its row of `down`, one of them with the other sign. The two cancel:
exactly in INT8, whose codes are the same but for the sign, and to rounding in floats.
Weights stay as large as they were. Each pair stands side by side, among the channels of
another block, which it makes INT8 round off in X.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.step import PyTree

CHANNELS = 4  # a layer; or pairs
WIDER = 128  # channels: a block
_CANDIDATES = 64


class Planted(NamedTuple):
    """A model with outliers.

    Attributes:
        params: Its parameters.
        channels: int32 [L, CHANNELS], of the trained model, those that have them or
            that pairs were made of.
        factors: float32 [L, CHANNELS], the powers of two, from 1 on.
    """

    params: PyTree
    channels: jax.Array
    factors: jax.Array


@jax.jit
def widen(params: PyTree) -> PyTree:
    """The parameters of `Llama` with channels of zeros after the others."""
    gate_up, down = _kernels(params)
    gate_up = jnp.pad(gate_up, [(0, 0)] * 3 + [(0, WIDER)])
    return _with_kernels(params, gate_up, jnp.pad(down, [(0, 0), (0, WIDER), (0, 0)]))


@jax.jit
def plant(params: PyTree, x: jax.Array, largest: float) -> Planted:
    """Plants outliers, divided.

    Args:
        params: Of `Llama`.
        x: The input of `down`, [L, M, F], for some text.
        largest: What `max |x|` of the channels becomes for this text, within a factor
            of sqrt(2), where it is less before.
    """
    channels, factors = _choose(x, largest)
    layers = jnp.arange(len(x))[:, None]
    scale = jnp.ones((len(x), x.shape[2])).at[layers, channels].set(factors)
    gate_up, down = _kernels(params)
    gate_up = gate_up.at[:, :, 1].multiply(scale[:, None])
    params = _with_kernels(params, gate_up, down / scale[:, :, None])
    return Planted(widen(params), channels, factors)


@jax.jit
def plant_pairs(params: PyTree, x: jax.Array, largest: float) -> Planted:
    """Plants outliers, in pairs; takes what `plant` takes."""
    channels, factors = _choose(x, largest)
    gate_up, down = _kernels(params)
    sources = jnp.take_along_axis(gate_up, channels[:, None, None], axis=3)
    sources = sources.at[:, :, 1].multiply(factors[:, None])
    rows = jnp.take_along_axis(down, channels[:, :, None], axis=1)
    signed = jnp.stack([rows, -rows], axis=2).reshape(len(x), 2 * CHANNELS, -1)

    width = x.shape[2]
    order = np.arange(width + WIDER)
    for pair in range(CHANNELS):
        block = pair * (width // WIDER) // CHANNELS
        here = WIDER * block + 2 * pair + np.arange(2)
        there = width + 2 * pair + np.arange(2)
        order[here], order[there] = there, here
    gate_up, down = _kernels(widen(params))
    added = slice(width, width + 2 * CHANNELS)
    gate_up = gate_up.at[..., added].set(jnp.repeat(sources, 2, axis=3))
    down = down.at[:, added].set(signed)
    params = _with_kernels(params, gate_up[..., order], down[:, order])
    return Planted(params, channels, factors)


def _choose(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """Channels of each layer, [L, CHANNELS], and the powers of two they need."""
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
    return channels, jnp.ldexp(jnp.float32(1.0), powers)  # exp2 is not exact


def _kernels(params: PyTree) -> tuple[jax.Array, jax.Array]:
    """Of gate and up, [L, H, 2, F], and of down, [L, F, H]."""
    mlp = params["layers"]["mlp"]
    return jnp.asarray(mlp["gate_up"]["kernel"]), jnp.asarray(mlp["down"]["kernel"])


def _with_kernels(params: PyTree, gate_up: jax.Array, down: jax.Array) -> PyTree:
    mlp = params["layers"]["mlp"]
    mlp = mlp | {"gate_up": {"kernel": gate_up}, "down": {"kernel": down}}
    return params | {"layers": params["layers"] | {"mlp": mlp}}
