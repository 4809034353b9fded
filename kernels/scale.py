"""The scale of a set of elements, from its largest magnitude."""

import jax
import jax.numpy as jnp
from jax import lax

TINY = 2.0**-118


def scale_of(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``amax / 127`` and ``127 / amax``, each correctly rounded.

    Args:
      amax: float32, ``max |x|`` of each set, NaN if it holds one.

    Returns:
      The scales and their reciprocals.  Both are 0 for an ``amax`` below ``TINY``; for
      one that is NaN or Inf the scale is NaN, its reciprocal 0.
    """
    finite = jnp.isfinite(amax)
    usable = finite & (amax >= TINY)
    divisor, top = jnp.where(usable, amax, 1.0), jnp.full_like(amax, 127.0)
    scale = jnp.where(usable, _divide(divisor, top), jnp.where(finite, 0.0, jnp.nan))
    return scale, jnp.where(usable, _divide(top, divisor), 0.0)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
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
