"""GEMMs of rows in groups, each with a matrix of its own, in plain ``jax.numpy``.

The rows of a group follow one another, and groups may have any number of them, so that
the groups' shares of one array are known at run time only ("ragged", as in
``jax.lax.ragged_dot``).  They are cut into tiles of ``m`` rows, each of one group; the
last of a group is filled up with zeros.  So a block belongs to one group, and a group's
codes, scales and products are those that its rows have alone.

As ops go these have a definition and no kernel.  Tiles are multiplied one after the
other, so that there is never a matrix a tile in memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.reference import Quantized, matmul


class Tiles(NamedTuple):
    """Where the M rows of G groups are in T tiles; int32.

    Attributes:
      rows: ``[T, m]``, the row at each place of each tile; M where there is none.
      places: ``[M]``, each row's place among all ``T * m``; that number where it is in
        none, because it comes after the last group.
      groups: ``[T]``, each tile's group; any where the tile is empty.
      used: ``[]``, the number of tiles that hold a row, which come first.
    """

    rows: jax.Array
    places: jax.Array
    groups: jax.Array
    used: jax.Array


def cut(group_sizes: jax.Array, rows: int, m: int) -> Tiles:
    """Cuts rows in groups into tiles.

    There are as many tiles as groups of any sizes can need: ``M/m``, and almost one
    more for each group.

    Args:
      group_sizes: integers ``[G]``, the number of rows of each group.
      rows: M, of which the groups take the first.
      m: the rows of a tile.
    """
    groups = group_sizes.shape[0]
    tiles = (rows + min(groups, rows) * (m - 1)) // m
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile_ends = jnp.cumsum((ends - starts + m - 1) // m)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])

    def group_of(index: jax.Array, ends: jax.Array) -> jax.Array:
        found = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        return jnp.minimum(found, groups - 1)

    tile = jnp.arange(tiles, dtype=jnp.int32)
    of_tile = group_of(tile, tile_ends)
    first = starts[of_tile] + (tile - tile_starts[of_tile]) * m
    row = first[:, None] + jnp.arange(m, dtype=jnp.int32)[None, :]
    is_row = (tile < tile_ends[-1])[:, None] & (row < ends[of_tile][:, None])

    row_index = jnp.arange(rows, dtype=jnp.int32)
    of_row = group_of(row_index, ends)
    place = tile_starts[of_row] * m + row_index - starts[of_row]
    return Tiles(
        jnp.where(is_row, row, rows),
        jnp.where(row_index < ends[-1], place, tiles * m),
        of_tile,
        tile_ends[-1],
    )


def to_tiles(x: jax.Array, tiles: Tiles) -> jax.Array:
    """The rows ``[M, C]`` in tiles ``[T, m, C]``, with zeros where there is no row."""
    return x.at[tiles.rows].get(mode="fill", fill_value=0)


def from_tiles(x: jax.Array, tiles: Tiles) -> jax.Array:
    """The rows ``[M, C]`` of tiles ``[T, m, C]``, zeros for those in no group."""
    x = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
    return x.at[tiles.places].get(mode="fill", fill_value=0)


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
    """Multiplies each tile with its group's matrix: ``[T, m, N]`` in ``dtype``.

    Args:
      lhs: codes ``[T, m, K]``, scales ``[T, 1, ceil(K/k)]``.
      residual: a second term of lhs, of the same shapes, or None.
      rhs: codes ``[G, N, K]``, scales ``[G, ceil(N/n), ceil(K/k)]``.
      groups: int32 ``[T]``, each tile's group; where it is none of G, zeros.
      block_shape: ``(m, k, n)``, the sides of a block.
      dtype: of the output.
    """

    def multiply(tile: tuple[Quantized, Quantized | None, jax.Array]) -> jax.Array:
        lhs, residual, group = tile
        lhs, residual = jax.tree.map(lambda x: x[None], (lhs, residual))
        of_group = jax.tree.map(lambda x: x[group][None], rhs)
        return matmul(lhs, residual, of_group, block_shape=block_shape, dtype=dtype)[0]

    def nothing(tile: tuple[Quantized, Quantized | None, jax.Array]) -> jax.Array:
        # An empty sum: 0, which varies over the axes of a mesh as the product does.
        zero = jnp.sum(tile[0].scales[:0]) + jnp.sum(rhs.scales[:0])
        shape = tile[0].codes.shape[0], rhs.codes.shape[1]
        return jnp.broadcast_to(zero.astype(dtype), shape)

    def one(tile: tuple[Quantized, Quantized | None, jax.Array]) -> jax.Array:
        there = (tile[2] >= 0) & (tile[2] < len(rhs.codes))
        return lax.cond(there, multiply, nothing, tile)

    return lax.map(one, (lhs, residual, groups))


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
    """Sums the products of each group's tiles over their rows: ``[G, K, N]``.

    The sums are in float32 and rounded once to ``dtype``; a group without tiles has
    zeros.

    Args:
      lhs: codes ``[T, K, m]``, scales ``[T, ceil(K/k), 1]``.
      rhs: codes ``[T, N, m]``, scales ``[T, ceil(N/n), 1]``.
      groups: int32 ``[T]``, each tile's group; where it is none of G, nothing is added.
      size: G.
      block_shape: ``(k, m, n)``, the sides of a block.
      dtype: of the output.
    """
    Tile = tuple[Quantized, Quantized, jax.Array]

    def add(sums: jax.Array, tile: Tile) -> jax.Array:
        lhs, rhs, group = tile
        lhs, rhs = jax.tree.map(lambda x: x[None], (lhs, rhs))
        product = matmul(lhs, None, rhs, block_shape=block_shape, dtype=jnp.float32)[0]
        return sums.at[group].add(product)

    def one(sums: jax.Array, tile: Tile) -> tuple[jax.Array, None]:
        there = (tile[2] >= 0) & (tile[2] < size)
        return lax.cond(there, add, lambda sums, _: sums, sums, tile), None

    shape = (size, lhs.codes.shape[1], rhs.codes.shape[1])
    sums = jnp.zeros(shape, jnp.float32)
    return lax.scan(one, sums, (lhs, rhs, groups))[0].astype(dtype)
