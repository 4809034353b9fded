"""Rotary position embeddings (RoPE)."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.model_config import LlamaConfig


def rotary_tables(config: LlamaConfig, seq_len: int) -> tuple[jax.Array, jax.Array]:
    """Computes the cosines and sines of the rotary angles.

    Args:
        config: Provides ``head_dim``, ``rope_theta`` and ``rope_scaling``.
        seq_len: The number of positions, S.

    Returns:
        Two float32 arrays of shape [1, S, 1, head_dim / 2].
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.scale(frequencies)
    positions = jnp.arange(seq_len, dtype=jnp.float32)
    angles = jnp.outer(positions, jnp.asarray(frequencies, jnp.float32))
    angles = angles[None, :, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each head by its position.

    Channel i is paired with channel i + head_dim / 2. The computation is in float32.

    Args:
        x: An array [B, S, heads, head_dim] of any floating dtype.
        tables: The result of `rotary_tables`.

    Returns:
        An array of the shape and dtype of ``x``.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
