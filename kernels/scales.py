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
    its own is off by up to 2 ulp.  So the quotient of the mantissas, an integer of 24
    bits, is estimated twice, the second time from the remainder that the first leaves;
    both products are exact modulo 2**32.  (A quotient of two floats is never halfway
    between two others.)
    """
    a_bits = lax.bitcast_convert_type(a, jnp.int32)
    b_bits = lax.bitcast_convert_type(b, jnp.int32)
    hidden, mask = jnp.int32(1 << 23), jnp.int32((1 << 23) - 1)
    dividend, divisor = a_bits & mask | hidden, b_bits & mask | hidden
    short = (dividend < divisor).astype(jnp.int32)  # the quotient's leading digit is 0
    wide_divisor = divisor.astype(jnp.float32)
    estimate = dividend.astype(jnp.float32) / wide_divisor * 2.0**23
    quotient = estimate.astype(jnp.int32) << short
    remainder = (dividend << (short + 23)) - quotient * divisor
    more = jnp.round(remainder.astype(jnp.float32) / wide_divisor).astype(jnp.int32)
    remainder -= more * divisor
    up, down = 2 * remainder > divisor, 2 * remainder < -divisor
    quotient += more + up.astype(jnp.int32) - down.astype(jnp.int32)
    exponent = (a_bits >> 23) - (b_bits >> 23) - short + 127
    power = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return quotient.astype(jnp.float32) * 2.0**-23 * power
