"""What the benchmark multiplies: never zeros, which a GPU computes with less power."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnums=1)
def activation(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A bf16 array with tails as activations have them: Student's t, four degrees.

    That is a normal variable over the root of a mean of two exponential ones, which
    compiles and runs much faster than ``jax.random.t``.
    """
    numerator, denominator = jax.random.split(key)
    scale = jnp.mean(jax.random.exponential(denominator, (2, *shape)), axis=0)
    return (jax.random.normal(numerator, shape) / jnp.sqrt(scale)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 3))
def swiglu(
    key: jax.Array, shape: tuple[int, ...], largest: float, channels_apart: int
) -> jax.Array:
    """A SwiGLU's output in bf16, with the outliers of large models.

    One channel of ``channels_apart`` has them, in one token of 64: magnitudes from 10
    on, evenly spread over the powers of ten up to ``largest``, which one of them is.
    """
    gate_key, up_key, place_key, size_key = jax.random.split(key, 4)
    gate = jax.random.normal(gate_key, shape)
    y = jax.nn.silu(gate) * jax.random.normal(up_key, shape)
    tokens, channels = shape
    has_outliers = (jnp.arange(channels) % channels_apart == 0)[None, :]
    drawn = jax.random.uniform(place_key, (tokens, 1)) < 1 / 64
    sizes = 10.0 * (largest / 10.0) ** jax.random.uniform(size_key, shape)
    first = (jnp.arange(tokens) == 0)[:, None]
    outliers = jnp.sign(y) * jnp.where(first, largest, sizes)
    return jnp.where((drawn | first) & has_outliers, outliers, y).astype(jnp.bfloat16)


def walks(vocabulary: int, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens int32 ``[..., S]`` that can be learned: each has four that may follow."""
    draw = np.random.default_rng(0).integers
    following = draw(0, vocabulary, (vocabulary, 4), np.int32)
    choices = draw(0, 4, shape)
    tokens = draw(0, vocabulary, shape, np.int32)
    for i in range(1, shape[-1]):
        tokens[..., i] = following[tokens[..., i - 1], choices[..., i]]
    return tokens
