"""Quantization where a block is split between devices, with an all-reduced maximum.

A device divides its shard into tiles, the largest that both the shard and a block are
made of.  It gathers the maxima of the other devices' tiles, a float32 each.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.sharding.assignment import ShardAssignment


def quantize_split_blocks(
    assignment: ShardAssignment,
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    **options: Any,
) -> Layouts:
    """``reference.quantize`` of a shard that may end inside a block.

    XLA's operations compute it on every device; there is no kernel.

    Args:
      assignment: its ``intra_block_axes`` split blocks of rows ``i`` and columns ``j``.
      x: this device's shard ``[B, R, C]``, bfloat16, float16 or float32.
      seeds: uint32 ``[B]``, of the noise.
      block: the rows and columns of a whole block.
      options: the roundings and the offset that ``reference.quantize`` takes.

    Returns:
      The codes of the shard, and the scales of every block that the devices along
      ``intra_block_axes`` hold together.
    """
    tile = (
        _tile_side(assignment, "i", x.shape[1], block[0]),
        _tile_side(assignment, "j", x.shape[2], block[1]),
    )
    tiles = block[0] // tile[0], block[1] // tile[1]  # in a block
    maxima = reference.block_metric(x, block=tile, criterion="absmax")
    amax = _amax_of_blocks(assignment, tiles, maxima)
    amax_of_tiles = _amax_of_tiles(assignment, tiles, amax, maxima.shape)
    rowwise, colwise = reference.quantize(
        x, seeds, block=tile, amax_reduce=lambda _: amax_of_tiles, **options
    )
    scales, _ = scale_and_inverse(amax)
    return Layouts(
        rowwise and Quantized(rowwise.codes, scales),
        colwise and Quantized(colwise.codes, scales.mT),
    )


def _tile_side(assignment: ShardAssignment, factor: str, size: int, side: int) -> int:
    return math.gcd(size, side) if factor in assignment.intra_block_axes else side


def _amax_of_blocks(
    assignment: ShardAssignment, tiles: tuple[int, int], x: jax.Array
) -> jax.Array:
    """The maxima of whole blocks, from those of this device's tiles ``[B, R, C]``."""
    for axis, factor, count in zip((1, 2), "ij", tiles, strict=True):
        if names := assignment.intra_block_axes.get(factor):
            x = lax.all_gather(x, names, axis=axis, tiled=True)
            blocks = (*x.shape[:axis], -1, count, *x.shape[axis + 1 :])
            x = find_amax(x.reshape(blocks), axis + 1)
    return x


def _amax_of_tiles(
    assignment: ShardAssignment,
    tiles: tuple[int, int],
    x: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """The block's maximum for each tile of this device, ``shape``."""
    for axis, factor, count in zip((1, 2), "ij", tiles, strict=True):
        if names := assignment.intra_block_axes.get(factor):
            tile = lax.axis_index(names) * shape[axis] + jnp.arange(shape[axis])
            x = jnp.take(x, tile // count, axis, mode="clip")
    return x
