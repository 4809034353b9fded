"""Absmax scales: one float32 a block, the same bits on every device."""

import jax
import jax.numpy as jnp
from jax import lax

TINY = 2.0**-118  # keeps the scale of INT8 codes and its inverse normal


def find_amax(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """``max |x|`` of float32 along axes, NaN where one is.

    A maximum of the bits: as integers, non-negative floats keep their order and NaN
    comes last, whereas XLA's float maximum may lose a NaN on CPUs.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis), jnp.float32)


def scale_and_inverse(
    amax: jax.Array, limit: float = 127.0, tiny: float = TINY
) -> tuple[jax.Array, jax.Array]:
    """``amax / limit`` and ``limit / amax``, where ``limit`` is the largest code.

    Below ``tiny``, which keeps both of them normal, a block counts as all zero: both
    are 0.  Where ``amax`` is not finite the scale is NaN and the inverse 0.
    """
    finite = jnp.isfinite(amax)
    usable = finite & (amax >= tiny)
    divisor, top = jnp.where(usable, amax, 1.0), jnp.full_like(amax, limit)
    scale = jnp.where(usable, divide(divisor, top), jnp.where(finite, 0.0, jnp.nan))
    return scale, jnp.where(usable, divide(top, divisor), 0.0)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a / b`` of positive float32, correctly rounded; all three normal.

    XLA turns a division by a constant into a product, and on NVIDIA GPUs a quotient of
    its own is off by up to 2 ulp.  This is long division of the mantissas in integers:
    31 bits and, in the last of them, whether anything is left.
    """
    a_bits = lax.bitcast_convert_type(a, jnp.uint32)
    b_bits = lax.bitcast_convert_type(b, jnp.uint32)
    hidden, mask = jnp.uint32(1 << 23), jnp.uint32((1 << 23) - 1)
    remainder, divisor = a_bits & mask | hidden, b_bits & mask | hidden
    quotient = remainder // divisor
    remainder %= divisor
    for digit in (8, 8, 8, 6):
        remainder <<= digit
        quotient = quotient << digit | remainder // divisor
        remainder %= divisor
    quotient |= (remainder > 0).astype(jnp.uint32)
    exponent = (a_bits >> 23) - (b_bits >> 23) + jnp.uint32(127)
    power = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return quotient.astype(jnp.float32) * 2.0**-30 * power
