"""Quantization and GEMMs of rows in groups, each group with its own matrix.

The rows of a group are adjacent.  The sizes of the groups are known only at run time,
as in ``jax.lax.ragged_dot``.  Each group is split into tiles of ``m`` rows, and its
last tile is padded with zeros.  So each block belongs to one group, and a group has the
same codes, scales and products as if its rows were alone.

The number of tiles is enough for groups of any sizes.  Tiles without rows come last;
they have scales of 0, and their codes and products have no meaning.

These functions are the definitions in plain ``jax.numpy``.  They multiply tiles one
after the other, so memory never holds one matrix per tile.
"""

import functools
from types import ModuleType
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import (
    FallbackOptions,
    FallbackQuantized,
    Layouts,
    Quantized,
    QuantizeOptions,
    matmul,
)
from fbq_jax.kernels.rounding import Seeds


class Tiles(NamedTuple):
    """Assigns the M rows of G groups to T tiles; all fields are int32.

    Attributes:
      first_rows: ``[T]``, the first row of each tile; arbitrary for a tile without
        rows.
      row_counts: ``[T]``, the number of rows of each tile, at most ``m``.
      groups: ``[T]``, each tile's group, in ascending order; G for a tile without rows.
      positions: ``[M]``, each row's position among all ``T * m``; ``T * m`` for rows
        after the last group, which are in no tile.
    """

    first_rows: jax.Array
    row_counts: jax.Array
    groups: jax.Array
    positions: jax.Array


class GroupedRows(NamedTuple):
    """Rows, and the tiles that they are split into.

    Attributes:
      values: ``[M, C]``.
      first_rows: int32 ``[T]``, as in ``Tiles``.
      row_counts: int32 ``[T]``, as in ``Tiles``.
    """

    values: jax.Array
    first_rows: jax.Array
    row_counts: jax.Array


def tile_count(groups: int, rows: int, m: int) -> int:
    """The number of tiles of m rows, enough for groups of any sizes.

    It is ``M/m``, plus nearly one per group.
    """
    return (rows + jax.core.min_dim(groups, rows) * (m - 1)) // m


def assign_tiles(group_sizes: jax.Array, rows: int, m: int) -> Tiles:
    """Splits the rows of each group into ``tile_count`` tiles.

    Args:
      group_sizes: integers ``[G]``, the number of rows of each group.
      rows: M.  The groups are the first rows.
      m: number of rows of a tile.
    """
    groups = group_sizes.shape[0]
    tiles = tile_count(groups, rows, m)
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile_ends = jnp.cumsum((ends - starts + m - 1) // m)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])

    def group_of(index: jax.Array, ends: jax.Array) -> jax.Array:
        # On a GPU, comparing with all ends is one kernel and a binary search is many.
        return jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)

    tile = jnp.arange(tiles, dtype=jnp.int32)
    tile_group = group_of(tile, tile_ends)
    group = jnp.minimum(tile_group, groups - 1)
    first = starts[group] + (tile - tile_starts[group]) * m
    row_counts = jnp.where(tile < tile_ends[-1], jnp.minimum(ends[group] - first, m), 0)

    row_index = jnp.arange(rows, dtype=jnp.int32)
    row_group = jnp.minimum(group_of(row_index, ends), groups - 1)
    position = tile_starts[row_group] * m + row_index - starts[row_group]
    position = jnp.where(row_index < ends[-1], position, tiles * m)
    # Without the barrier, XLA would compute positions again for each element of a row.
    return lax.optimization_barrier(Tiles(first, row_counts, tile_group, position))


def tile_ranges(groups: jax.Array, size: int) -> jax.Array:
    """The first tile of each group and the number of its tiles, int32 ``[G, 2]``.

    Args:
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
    """
    group = jnp.arange(size, dtype=groups.dtype)[:, None]
    first = jnp.sum(groups[None, :] < group, axis=1, dtype=jnp.int32)
    count = jnp.sum(groups[None, :] == group, axis=1, dtype=jnp.int32)
    return jnp.stack([first, count], axis=1)


def to_tiles(x: GroupedRows, m: int) -> jax.Array:
    """Copies rows to tiles ``[T, m, C]``, with zeros for missing rows."""
    row = jnp.arange(m, dtype=jnp.int32)[None, :]
    is_row = row < x.row_counts[:, None]
    index = jnp.where(is_row, x.first_rows[:, None] + row, x.values.shape[0])
    return x.values.at[index].get(mode="fill", fill_value=0)


def from_tiles(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Copies tiles ``[T, m, C]`` to rows ``[M, C]``, with zeros for ungrouped rows."""
    x = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
    return x.at[tiles.positions].get(mode="fill", fill_value=0)


def ragged_quantize(
    x: GroupedRows,
    seeds: Seeds,
    *,
    ops: ModuleType = reference,
    **options: Unpack[QuantizeOptions],
) -> Layouts:
    """Quantizes each tile as a matrix ``[m, C]``; see ``reference.quantize``.

    Args:
      x: the rows, bfloat16, float16 or float32.
      seeds: the seeds of stochastic rounding, of T matrices.
      ops: the module whose quantization ops are used.
      **options: those of ``reference.quantize``; the blocks have ``m`` rows.

    Returns:
      Rowwise codes ``[T, m, C]`` and colwise codes ``[T, C, m]``.
    """
    tiles = to_tiles(x, options["block"][0])
    quantized: Layouts = ops.quantize(tiles, seeds, **options)
    return quantized


def ragged_quantize_fallback(
    x: GroupedRows,
    theta: jax.Array,
    seeds: Seeds,
    *,
    ops: ModuleType = reference,
    **options: Unpack[FallbackOptions],
) -> FallbackQuantized:
    """Quantizes tiles as ``ragged_quantize``; see ``reference.quantize_fallback``."""
    tiles = to_tiles(x, options["block"][0])
    quantized: FallbackQuantized = ops.quantize_fallback(tiles, theta, seeds, **options)
    return quantized


@functools.partial(jax.jit, static_argnames=("block_shape", "dtype"))
def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies each tile with its group's matrix; see ``reference.matmul``.

    Args:
      lhs: codes int8 ``[T, m, K]``, scales float32 ``[T, 1, ceil(K/k)]``.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes int8 ``[G, N, K]``, scales float32 ``[G, ceil(N/n), ceil(K/k)]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.  The product of a
        tile whose group is not in ``[0, G)`` has no meaning; here it is 0.
      block_shape: ``(m, k, n)``, the size of a block along rows, K and N.
      dtype: dtype of the output.

    Returns:
      ``[T, m, N]`` in ``dtype``.
    """
    Tile = tuple[Quantized, Quantized | None, jax.Array]

    def multiply(tile: Tile) -> jax.Array:
        lhs, residual, group = tile
        lhs, residual = jax.tree.map(lambda x: x[None], (lhs, residual))
        matrix = jax.tree.map(lambda x: x[group][None], rhs)
        return matmul(lhs, residual, matrix, block_shape=block_shape, dtype=dtype)[0]

    def zeros(tile: Tile) -> jax.Array:
        # An empty sum over the operands varies over the mesh axes of their product.
        zero = jnp.sum(tile[0].scales[:0]) + jnp.sum(rhs.scales[:0])
        shape = tile[0].codes.shape[0], rhs.codes.shape[1]
        return jnp.broadcast_to(zero.astype(dtype), shape)

    def multiply_tile(tile: Tile) -> jax.Array:
        is_valid = (tile[2] >= 0) & (tile[2] < len(rhs.codes))
        return lax.cond(is_valid, multiply, zeros, tile)

    return lax.map(multiply_tile, (lhs, residual, groups))


@functools.partial(jax.jit, static_argnames=("size", "block_shape", "dtype"))
def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Contracts the rows of each tile, and sums the products of each group.

    The sums are in float32 and rounded once to ``dtype``.  A group without tiles gives
    zeros.

    Args:
      lhs: codes int8 ``[T, K, m]``, scales float32 ``[T, ceil(K/k), 1]``.
      rhs: codes int8 ``[T, N, m]``, scales float32 ``[T, ceil(N/n), 1]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.  A tile whose group
        is not in ``[0, G)`` adds nothing.
      size: G.
      block_shape: ``(k, m, n)``, the size of a block along K, rows and N.
      dtype: dtype of the output.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    Tile = tuple[Quantized, Quantized, jax.Array]

    def add(sums: jax.Array, tile: Tile) -> jax.Array:
        lhs, rhs, group = tile
        lhs, rhs = jax.tree.map(lambda x: x[None], (lhs, rhs))
        product = matmul(lhs, None, rhs, block_shape=block_shape, dtype=jnp.float32)[0]
        return sums.at[group].add(product)

    def add_tile(sums: jax.Array, tile: Tile) -> tuple[jax.Array, None]:
        is_valid = (tile[2] >= 0) & (tile[2] < size)
        return lax.cond(is_valid, add, lambda sums, _: sums, sums, tile), None

    # An empty sum over the operands varies over the mesh axes of their product.
    zero = jnp.sum(lhs.scales[:0]) + jnp.sum(rhs.scales[:0])
    zero += jnp.sum(groups[:0]).astype(jnp.float32)
    sums = jnp.broadcast_to(zero, (size, lhs.codes.shape[1], rhs.codes.shape[1]))
    return lax.scan(add_tile, sums, (lhs, rhs, groups))[0].astype(dtype)
