"""Tiles: where the rows of groups lie, such as the tokens of a mixture's experts.

The rows of a group are adjacent.  The sizes of the groups are known only at run time,
as in ``jax.lax.ragged_dot``.  Each group is split into tiles of ``m`` rows, and its
last tile is padded with zeros.  So each block belongs to one group, and a group has the
same codes, scales and products as if its rows were alone.

The number of tiles is enough for groups of any sizes.  Tiles without rows come last;
they have scales of 0, and their codes and products have no meaning.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


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


def tile_count(groups: int, rows: int, m: int) -> int:
    """The number of tiles of m rows, enough for groups of any sizes.

    It is ``M/m``, plus nearly one per group.
    """
    return (rows + jax.core.min_dim(groups, rows) * (m - 1)) // m


def assign_tiles(group_sizes: jax.Array, rows: int, m: int) -> Tiles:
    """Splits the rows of each group into ``tile_count`` tiles.

    Args:
      group_sizes: integers ``[G]``, the number of rows of each group.
      rows: M.  The groups are the first rows; sizes beyond M count as far as M.
      m: number of rows of a tile.
    """
    groups = group_sizes.shape[0]
    tiles = tile_count(groups, rows, m)
    ends = group_ends(group_sizes, rows)
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


def group_ends(group_sizes: jax.Array, rows: int) -> jax.Array:
    """The number of rows up to the end of each group, int32 ``[G]``, at most M.

    Args:
      group_sizes: integers ``[G]`` of any dtype; a negative size counts as 0.
      rows: M.  The sum of the sizes may exceed it, and the range of their dtype.
    """
    largest = min(jnp.iinfo(jnp.int32).max, jnp.iinfo(group_sizes.dtype).max)
    sizes = group_sizes.clip(0, largest).astype(jnp.int32)
    # The first sum above M fits in uint32.  Later ones may wrap around.
    sums = jnp.cumsum(jnp.minimum(sizes, rows), dtype=jnp.uint32)
    whole = jnp.asarray(rows, jnp.int32).astype(jnp.uint32)
    return lax.cummax(jnp.minimum(sums, whole)).astype(jnp.int32)


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


def gather_tiles(
    rows: jax.Array, first_rows: jax.Array, row_counts: jax.Array, m: int
) -> jax.Array:
    """Copies rows ``[M, C]`` to tiles ``[T, m, C]``, with zeros for missing rows."""
    row = jnp.arange(m, dtype=jnp.int32)[None, :]
    is_row = row < row_counts[:, None]
    index = jnp.where(is_row, first_rows[:, None] + row, rows.shape[0])
    return rows.at[index].get(mode="fill", fill_value=0)


def from_tiles(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Copies tiles ``[T, m, C]`` to rows ``[M, C]``, with zeros for ungrouped rows."""
    x = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
    return x.at[tiles.positions].get(mode="fill", fill_value=0)
