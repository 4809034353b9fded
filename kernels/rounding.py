"""Nearest and stochastic rounding, and the noise that every implementation draws.

Stochastic rounding here is nearest rounding of ``v + w`` with ``w`` uniform in
(-1/2, 1/2), an odd multiple of ``2**-17``.  For an integer ``v``, a code, the sum is
exact in float32 and no tie, so that an integer never moves; for any other the chance of
rounding up is its fraction to about ``2**-17``.

The noise is counter based: a function of a seed and of an element's row and column in
the matrix that is rounded.  A kernel may therefore visit the elements in any order,
tiling or layout, and a transposed copy gets the bits of the original.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: consecutive counters land far apart
_COLUMN_STREAM = 0x5851F42D


def mix(x: jax.Array) -> jax.Array:
    """Scrambles uint32 words: murmur3's 32-bit finalizer, a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fold(seed: jax.Array, data: jax.Array | int) -> jax.Array:
    """Derives a new seed from a seed and a counter, both uint32 of any shape."""
    return mix(mix(seed) + jnp.uint32(_GOLDEN) * jnp.asarray(data).astype(jnp.uint32))


def noise(seed: jax.Array, rows: int, columns: int) -> jax.Array:
    """Uniform noise in (-1/2, 1/2) for a matrix.

    One hash a row and one a column are added and hashed once more, so that a kernel
    pays one hash an element.

    Args:
      seed: uint32 ``[]``.
      rows: number of rows of the matrix.
      columns: number of columns.

    Returns:
      float32 ``[rows, columns]``, odd multiples of ``2**-17``.
    """
    row_key = fold(seed, jnp.arange(rows, dtype=jnp.uint32))
    column_key = fold(
        seed ^ jnp.uint32(_COLUMN_STREAM), jnp.arange(columns, dtype=jnp.uint32)
    )
    bits = mix(row_key[:, None] + column_key[None, :]) >> 16
    return (bits.astype(jnp.float32) - 32767.5) * 2.0**-16
