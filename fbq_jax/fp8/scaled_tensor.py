"""Tensors in FP8 or FP16 with one float32 scale each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import rounding
from fbq_jax.kernels.scales import find_amax

# Bounds a factor so that its inverse is not subnormal: devices flush those to 0.
MAX_FACTOR = 2.0**126


class ScaledTensor(NamedTuple):
    """A tensor as ``values * scale``.

    Attributes:
      values: float8_e4m3fn, float8_e5m2 or float16, of the tensor's shape.
      scale: float32 ``[]``.
    """

    values: jax.Array
    scale: jax.Array

    def dequantize(self) -> jax.Array:
        """Returns the tensor in float32."""
        return self.values.astype(jnp.float32) * self.scale.astype(jnp.float32)


def quantize(
    x: jax.Array, dtype: jax.typing.DTypeLike, seed: jax.Array | None = None
) -> ScaledTensor:
    """Scales ``max |x|`` to the largest finite value of ``dtype`` and rounds.

        values = round(x * max(dtype) / max |x|)        scale = max |x| / max(dtype)

    A NaN or an Inf turns the whole tensor into NaN.

    Args:
      x: float32, of any shape.
      dtype: float8_e4m3fn, float8_e5m2 or float16.
      seed: uint32 ``[]``, seeds stochastic rounding; None rounds to nearest, ties to
        even.

    >>> quantize(jnp.array([0.0, 0.3, 2.0]), jnp.float8_e4m3fn).values
    Array([0, 64, 448], dtype=float8_e4m3fn)
    """
    largest = float(jnp.finfo(dtype).max)
    amax = find_amax(x, initial=0)
    # The first bound keeps the quotient finite; the second one keeps XLA from computing
    # the scale as amax / largest, with another rounding.
    divisor = jnp.maximum(amax, largest / MAX_FACTOR)
    factor = jnp.minimum(largest / divisor, MAX_FACTOR)
    # The product can round to just above the largest value.
    scaled = jnp.clip(x * factor, -largest, largest)
    if seed is not None:
        scaled = _round_stochastically(scaled, dtype, seed)
    return ScaledTensor(scaled.astype(dtype), 1.0 / factor)


def _round_stochastically(
    x: jax.Array, dtype: jax.typing.DTypeLike, seed: jax.Array
) -> jax.Array:
    """Rounds x to one of its two neighbours in ``dtype``, with float32 values."""
    info = jnp.finfo(dtype)
    # Not frexp and ldexp, whose constant Inf would stop calls under jax_debug_infs.
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
    step = jnp.maximum(exponent, info.minexp) - info.nmant
    columns = x.shape[-1] if x.ndim else 1
    noise = rounding.noise(seed, x.size // max(1, columns), columns).reshape(x.shape)
    return jnp.rint(x * _power_of_two(-step) + noise) * _power_of_two(step)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """``2**exponent`` in float32, from its bits, for int32 exponents of normals."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)
