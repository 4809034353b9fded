"""Nearest and stochastic rounding, and the noise that every implementation draws.

Stochastic rounding here is nearest rounding of ``v + w`` with ``w`` uniform in
(-1/2, 1/2), an odd multiple of ``2**-16``.  For an integer ``v``, a code, the sum is
exact in float32 and no tie, so that an integer never moves; for any other the chance of
rounding up is its fraction to about ``2**-16``.

The noise is counter based: a function of a seed and of an element's row and column in
the matrix that is rounded.  A kernel may therefore visit the elements in any order,
tiling or layout, and a transposed copy gets the bits of the original; so does a part of
a matrix that is told its ``GlobalOffset``.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: consecutive counters land far apart
_COLUMN_STREAM = 0x5851F42D

ROW_GROUP = 32  # rows that lie together: a divisor of every block's


class GlobalOffset(NamedTuple):
    """Where a matrix lies in the one that it was cut from.

    Attributes:
      rows: uint32 ``[ceil(R/32)]``, the index there of the first of each 32 rows; even.
      column: uint32 ``[1]``, the index of the first column.
    """

    rows: jax.Array
    column: jax.Array


def no_offset(rows: int) -> GlobalOffset:
    """The origin of a matrix of its own."""
    return GlobalOffset(
        jnp.arange(0, rows, ROW_GROUP, jnp.uint32), jnp.zeros(1, jnp.uint32)
    )


def mix(x: jax.Array) -> jax.Array:
    """Scrambles uint32 words: murmur3's 32-bit finalizer, a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fold(seed: jax.Array, data: jax.Array | int) -> jax.Array:
    """Derives a new seed from a seed and a counter, both uint32 of any shape."""
    return mix(mix(seed) + jnp.uint32(_GOLDEN) * jnp.asarray(data).astype(jnp.uint32))


def _high_half(a: jax.Array, b: jax.Array) -> jax.Array:
    """Bits 32 to 63 of the product of uint32.

    Of 16-bit halves, because XLA cannot partition an operation of its own for this.
    """
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    first = a_high * b_low + (a_low * b_low >> 16)
    second = a_low * b_high + (first & 0xFFFF)
    return a_high * b_high + (first >> 16) + (second >> 16)


def noise(
    seed: jax.Array, rows: int, columns: int, global_offset: GlobalOffset | None = None
) -> jax.Array:
    """Uniform noise in (-1/2, 1/2) for a matrix.

    Two rows and a column share a word: the halves, mixed, of the 64-bit product of a
    hash of the rows and one of the column.  The first row's noise is the low half of
    the word, the second's the high one.  So a kernel pays one product for two elements.

    Args:
      seed: uint32 ``[]``.
      rows: number of rows of the matrix.
      columns: number of columns.
      global_offset: where it lies in a larger one.

    Returns:
      float32 ``[rows, columns]``, odd multiples of ``2**-16``.
    """
    row = jnp.arange(rows, dtype=jnp.uint32)[:, None]
    column = jnp.arange(columns, dtype=jnp.uint32)[None, :]
    if global_offset is not None:
        row = row % ROW_GROUP + jnp.repeat(global_offset.rows, ROW_GROUP)[:rows, None]
        column += global_offset.column[:, None]
    # Odd, because an even factor loses bits of the other.
    a = fold(seed, row >> 1) | 1
    b = fold(seed ^ jnp.uint32(_COLUMN_STREAM), column) | 1
    words = a * b + _high_half(a, b) * jnp.uint32(_GOLDEN)
    bits = (words >> 16 * (row & 1)) & 0xFFFF | 1
    return (bits.astype(jnp.float32) - 2.0**15) * 2.0**-16
