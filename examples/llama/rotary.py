"""Rotary position embeddings (RoPE)."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.model_config import LlamaConfig, Rope


def rotary_tables(
    config: LlamaConfig, seq_len: int, start: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the cosines and sines of the rotary angles from position ``start`` on.

    Returns:
        Two float32 arrays of shape [kinds, seq_len, 1, head_dim / 2], for each of
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
    """Rotates each head, [B, S, heads, head_dim], by its position.

    Channel i is paired with channel i + head_dim / 2. The computation is in float32;
    ``tables`` are those of one kind of layer.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
