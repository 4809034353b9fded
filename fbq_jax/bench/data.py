"""Random operands. None are zeros, which a GPU multiplies with less power."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnums=1)
def activation(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A bf16 array with heavy tails, as activations have: Student's t, 4 degrees.

    The sample is a normal variable over the square root of the mean of two exponential
    ones. It compiles and runs much faster than ``jax.random.t``.
    """
    numerator, denominator = jax.random.split(key)
    scale = jnp.mean(jax.random.exponential(denominator, (2, *shape)), axis=0)
    return (jax.random.normal(numerator, shape) / jnp.sqrt(scale)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 3))
def swiglu(
    key: jax.Array, shape: tuple[int, ...], largest: float, channels_apart: int
) -> jax.Array:
    """A SwiGLU output in bf16 with the outliers of large models.

    Every ``channels_apart``-th channel has an outlier in one token of 64. Magnitudes
    start at 10 and are log-uniform up to ``largest``, which the first token reaches.

    Args:
      key: the PRNG key.
      shape: ``[tokens, channels]``.
      largest: the largest magnitude, above 10.
      channels_apart: the distance between channels with outliers.
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
