"""Nearest and stochastic rounding, and the noise shared by all implementations.

Stochastic rounding of ``v`` is nearest rounding of ``v + w``.  The noise ``w`` is
uniform over the odd multiples of ``2**-16`` in (-1/2, 1/2).  An integer ``v`` of 8 bits
never changes, because ``v + w`` is exact in float32 and is not a tie.  Any other value
rounds up with a probability equal to its fractional part, to within about ``2**-16``.

The noise is counter based: it depends only on a seed and on an element's row and column
in the global matrix.  A kernel may therefore visit elements in any order, tiling or
layout.  A transposed copy draws the same noise as the original, and a shard draws the
noise at its ``GlobalOffset``.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.apart import call_apart

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio, which spreads consecutive counters.
_COLUMN_STREAM = 0x5851F42D

ROW_GROUP = 32  # Rows that stay adjacent in a shard; divides the rows of a block.


CallSeed = jax.Array | tuple[jax.Array, jax.Array, jax.Array]
"""The seed of a call's noise, uint32 ``[]``.  Or three, to be folded by ``fold_seeds``:
the seed of a layer, the number of its calls, and how many of them are not earlier: 1 if
the number counts this call, else 0."""


class MatrixSeeds(NamedTuple):
    """The seeds of a stack of matrices, to be folded by ``fold_seeds``; uint32 ``[B]``.

    Kernels fold them, which saves launches.

    Attributes:
      layer: the seed of the layer.
      calls: the number of its calls.
      place: ``8 * index + 2 * stream + not_earlier``: the index of the matrix, the
        stream of noise in the call, below 4, and what a ``CallSeed`` says of ``calls``.
    """

    layer: jax.Array
    calls: jax.Array
    place: jax.Array


Seeds = jax.Array | MatrixSeeds
"""The seeds of a stack of matrices, uint32 ``[B]``, or what they are folded from."""


class GlobalOffset(NamedTuple):
    """The offset of a shard in the global matrix, which selects its noise.

    Attributes:
      rows: uint32 ``[ceil(R/32)]``, the global index of the first row of each group of
        32 rows.  Must be even.
      column: uint32 ``[1]``, the global index of the first column.
    """

    rows: jax.Array
    column: jax.Array


def no_offset(rows: int) -> GlobalOffset:
    """The offset of a matrix that is not sharded, given its number of rows."""
    return GlobalOffset(
        jnp.arange(0, rows, ROW_GROUP, jnp.uint32), jnp.zeros(1, jnp.uint32)
    )


def mix(x: jax.Array) -> jax.Array:
    """Scrambles uint32 words with MurmurHash3's 32-bit finalizer, a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fold(seed: jax.Array, data: jax.Array | int) -> jax.Array:
    """Derives a new seed from a seed and a counter, both uint32 of any shape."""
    return mix(mix(seed) + jnp.uint32(_GOLDEN) * jnp.asarray(data).astype(jnp.uint32))


def fold_seeds(seeds: CallSeed | Seeds) -> jax.Array:
    """Folds the seed of a layer with its earlier calls, and with a matrix's place."""
    if not isinstance(seeds, tuple):
        return seeds
    layer, calls, last = seeds
    if not isinstance(seeds, MatrixSeeds):
        return fold(layer, calls - last)
    call = fold(layer, calls - (last & 1))
    return fold(fold(call, (last >> 1) & 3), last >> 3)


def _high_half(a: jax.Array, b: jax.Array) -> jax.Array:
    """Bits 32 to 63 of the product of two uint32.

    It is computed from 16-bit halves, because XLA cannot partition its own operation.
    """
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    first = a_high * b_low + (a_low * b_low >> 16)
    second = a_low * b_high + (first & 0xFFFF)
    return a_high * b_high + (first >> 16) + (second >> 16)


def _high_half_on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
    """``_high_half`` in a third of the operations, for devices with 64-bit integers."""
    with jax.enable_x64(True):
        product = a.astype(jnp.uint64) * b.astype(jnp.uint64)
        return (product >> jnp.uint64(32)).astype(jnp.uint32)


def noise(
    seed: jax.Array, rows: int, columns: int, global_offset: GlobalOffset | None = None
) -> jax.Array:
    """Draws the noise of a matrix, uniform in (-1/2, 1/2).

    With ``a = fold(seed, row // 2) | 1`` and ``b = fold(seed ^ stream, column) | 1``,

        word = (a * b mod 2**32) + floor(a * b / 2**32) * golden  (mod 2**32).

    The low half of the word gives the noise of the even row, and the high half the odd
    row's.  So a kernel needs one product for two elements.

    Args:
      seed: uint32 ``[]``.
      rows: the number of rows of the matrix.
      columns: the number of columns of the matrix.
      global_offset: the offset in the global matrix; None for no offset.

    Returns:
      float32 ``[rows, columns]``, odd multiples of ``2**-16``.
    """

    def join_factors(seed: jax.Array, global_offset: GlobalOffset | None) -> jax.Array:
        row, column = _positions(rows, columns, global_offset)
        return _joined_factors(seed, row[::2], column)

    joined = call_apart(join_factors, seed, global_offset)
    pairs = joined.shape[0] - columns
    # Arrays that broadcast implicitly would be three operations of XLA each.
    shape = pairs, 2, columns
    factors = NoiseFactors(
        lax.broadcast_in_dim(joined[:pairs], shape, (0,)),
        lax.broadcast_in_dim(joined[pairs:], shape, (2,)),
        lax.broadcasted_iota(jnp.uint32, shape, 1) * 16,
    )
    on_cpu = functools.partial(noise_of, high_half=_high_half_on_cpu)
    drawn = lax.platform_dependent(factors, cpu=on_cpu, default=noise_of)
    return drawn.reshape(2 * pairs, columns)[:rows]


def noise_of_rows(seeds: jax.Array, rows: jax.Array, columns: int) -> jax.Array:
    """Draws the noise of single rows, each of a matrix of its own.

    Args:
      seeds: uint32 ``[R]``, the seeds of the matrices.
      rows: integers ``[R]``, the index of each row in its matrix.
      columns: the number of columns of the matrices.

    Returns:
      float32 ``[R, columns]``, the noise that ``noise`` draws for these rows.
    """
    rows, column = rows.astype(jnp.uint32), jnp.arange(columns, dtype=jnp.uint32)
    return noise_of(_factors(seeds[:, None], rows[:, None], column[None, :]))


class NoiseFactors(NamedTuple):
    """What ``noise`` is computed from, for rows ``[R, 1]`` and columns ``[1, C]``.

    Attributes:
      row: uint32, the factor ``a`` of each row.
      column: uint32, the factor ``b`` of each column; ``[R, C]`` if each row has
        another seed.
      shift: uint32, 16 for an odd row, else 0.
    """

    row: jax.Array
    column: jax.Array
    shift: jax.Array


def noise_factors(
    seed: jax.Array, rows: int, columns: int, global_offset: GlobalOffset | None = None
) -> NoiseFactors:
    """The factors of a matrix's noise, with the arguments of ``noise``."""
    row, column = _positions(rows, columns, global_offset)
    joined = _joined_factors(seed, row, column)
    shift = 16 * (jnp.arange(rows, dtype=jnp.uint32) & 1)  # a shard's first row is even
    return NoiseFactors(joined[:rows, None], joined[None, rows:], shift[:, None])


def _positions(
    rows: int, columns: int, global_offset: GlobalOffset | None
) -> tuple[jax.Array, jax.Array]:
    """The index in the global matrix of each row and of each column."""
    row, column = (jnp.arange(size, dtype=jnp.uint32) for size in (rows, columns))
    if global_offset is not None:
        row = row % ROW_GROUP + jnp.repeat(global_offset.rows, ROW_GROUP)[:rows]
        column += global_offset.column
    return row, column


def _joined_factors(seed: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """The factors of these rows, and then of these columns, in one array.

    It has half the operations of two.
    """
    of_rows = jnp.broadcast_to(seed, row.shape)
    of_columns = jnp.broadcast_to(seed ^ jnp.uint32(_COLUMN_STREAM), column.shape)
    joined = jnp.concatenate([of_rows, of_columns])
    # An even factor would lose bits of the other one.
    return fold(joined, jnp.concatenate([row >> 1, column])) | 1


def _factors(seed: jax.Array, row: jax.Array, column: jax.Array) -> NoiseFactors:
    """The factors of the noise in these rows and columns, uint32."""
    # An even factor would lose bits of the other one.
    a = fold(seed, row >> 1) | 1
    b = fold(seed ^ jnp.uint32(_COLUMN_STREAM), column) | 1
    return NoiseFactors(a, b, 16 * (row & 1))


def noise_of(
    factors: NoiseFactors,
    high_half: Callable[[jax.Array, jax.Array], jax.Array] = _high_half,
) -> jax.Array:
    """The noise of the rows and columns with these factors, float32."""
    a, b, shift = factors
    words = a * b + high_half(a, b) * jnp.uint32(_GOLDEN)
    bits = (words >> shift) & 0xFFFF | 1
    return (bits.astype(jnp.int32).astype(jnp.float32) - 2.0**15) * 2.0**-16
