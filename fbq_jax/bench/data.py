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
