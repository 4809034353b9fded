"""Rotary position embeddings (RoPE)."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.model_config import LlamaConfig, Rope


def rotary_tables(
    config: LlamaConfig, seq_len: int, start: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the cosines and sines of the rotary angles.

    Args:
        config: Provides ``head_dim`` and the kinds of layers.
        seq_len: The number of positions, S.
        start: The first position, int32 []; None means 0.

    Returns:
        Two float32 arrays of shape [kinds, S, 1, head_dim / 2], for each of
        ``config.distinct_kinds()``. The angles of a kind without rotation are 0.
    """
    kinds = config.distinct_kinds()
    ropes = [_frequencies(kind.rope, config.head_dim) for kind in kinds]
    positions = jnp.arange(seq_len, dtype=jnp.float32)
    if start is not None:
        positions += start.astype(jnp.float32)
    frequencies = jnp.asarray([frequencies for frequencies, _ in ropes], jnp.float32)
    angles = (positions[None, :, None] * frequencies[:, None])[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if all(factor == 1 for _, factor in ropes):
        return cos, sin
    factors = jnp.asarray([factor for _, factor in ropes], jnp.float32)
    factors = factors[:, None, None, None]
    return cos * factors, sin * factors


def _frequencies(rope: Rope | None, head_dim: int) -> tuple[np.ndarray, float]:
    """The frequencies [head_dim / 2] of a rotation, and the factor of its tables."""
    if rope is None:
        return np.zeros(head_dim // 2), 1.0
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.scaling is None:
        return frequencies, 1.0
    return rope.scaling.scale(frequencies), rope.scaling.attention_factor


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each head by its position.

    Channel i is paired with channel i + head_dim / 2. The computation is in float32.

    Args:
        x: An array [B, S, heads, head_dim] of any floating dtype.
        tables: The result of `rotary_tables` for one kind of layer.

    Returns:
        An array of the shape and dtype of ``x``.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
