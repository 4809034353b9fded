"""Absmax scales in float32, with the same bits on every device."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

TINY = 2.0**-118  # From here on, INT8 scales and their inverses are normal floats.
FLOAT8_LIMIT = 448.0  # the largest value of E4M3
FLOAT8_TINY = 2.0**-117  # TINY of FP8 scales


def find_amax(
    x: jax.Array,
    axis: int | tuple[int, ...] | None = None,
    *,
    keepdims: bool = False,
    initial: int | None = None,
) -> jax.Array:
    """``max |x|`` of float32 along axes, as ``jnp.max``; NaN if there is one.

    The maximum is over bits: as integers, non-negative floats have the same order, with
    NaN last.  On CPUs, XLA's maximum of floats may drop a NaN.  An axis of size 0 needs
    ``initial=0``.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    largest = jnp.max(bits, axis=axis, keepdims=keepdims, initial=initial)
    return lax.bitcast_convert_type(largest, jnp.float32)


def scale_and_inverse(
    amax: jax.Array, limit: float = 127.0, tiny: float = TINY
) -> tuple[jax.Array, jax.Array]:
    """Computes ``amax / limit`` and ``limit / amax``.

    Both are 0 where ``amax < tiny``.  The scale is NaN and the inverse 0 where ``amax``
    is not finite.

    Args:
      amax: float32 of any shape.
      limit: the largest code.
      tiny: the smallest ``amax`` for which both results are normal floats.
    """
    finite = jnp.isfinite(amax)
    usable = finite & (amax >= tiny)
    divisor, top = jnp.where(usable, amax, 1.0), jnp.full_like(amax, limit)
    scale = jnp.where(usable, divide(divisor, top), jnp.where(finite, 0.0, jnp.nan))
    return scale, jnp.where(usable, divide(top, divisor), 0.0)


def scale_and_inverse_by_platform(
    amax: jax.Array, limit: float, tiny: float
) -> tuple[jax.Array, jax.Array]:
    """``scale_and_inverse``, but on CPUs with two divisions, which compile sooner.

    A CPU rounds quotients correctly.  Kernels do not have this.
    """

    def on_cpu(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        finite = lax.is_finite(amax)
        usable = finite & (amax >= tiny)
        zero, nan, top = (jnp.full_like(amax, x) for x in (0.0, jnp.nan, limit))
        # A divisor that is no constant to XLA, which would multiply by its inverse.
        divisor = lax.select(finite, top, amax)
        scale = lax.select(usable, amax, lax.select(finite, zero, nan)) / divisor
        return scale, top / lax.select(usable, amax, jnp.full_like(amax, jnp.inf))

    default = functools.partial(scale_and_inverse, limit=limit, tiny=tiny)
    scale, inverse = lax.platform_dependent(amax, cpu=on_cpu, default=default)
    return scale, inverse


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Divides positive float32 with correct rounding.

    Operands and quotient must be normal.  XLA does not round correctly: it replaces a
    division by a constant with a product, and on NVIDIA GPUs its quotients are off by
    up to 2 ulp.

    The quotient of the mantissas is an integer of 24 bits.  A float division estimates
    it, and a second one, of the exact remainder, corrects the estimate.  Both products
    are exact modulo 2**32.  A quotient of two floats is never halfway between two
    neighbouring floats, so there are no ties.
    """
    a_bits = lax.bitcast_convert_type(a, jnp.int32)
    b_bits = lax.bitcast_convert_type(b, jnp.int32)
    hidden, mask = jnp.int32(1 << 23), jnp.int32((1 << 23) - 1)
    dividend, divisor = a_bits & mask | hidden, b_bits & mask | hidden
    # One more bit is needed where the quotient of the mantissas is below 1.
    short = (dividend < divisor).astype(jnp.int32)
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
