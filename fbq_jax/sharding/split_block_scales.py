"""Quantization of blocks that are split between devices, with an all-reduced maximum.

A device divides its shard into the largest tiles that divide both the shard and a
block.  It gathers the maxima of the other devices' tiles, one float32 per tile.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import Block, CodeDtype, Layouts, Quantized
from fbq_jax.kernels.scales import find_amax
from fbq_jax.sharding.assignment import ShardAssignment


def quantize_split_blocks(
    assignment: ShardAssignment,
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
    **options: Any,
) -> Layouts:
    """``reference.quantize`` for a shard that may end inside a block.

    It runs as XLA ops; there is no kernel.

    Args:
      assignment: the assigned mesh axes; ``intra_block_axes`` split blocks along rows
        ``i`` and columns ``j``.
      x: this device's shard ``[B, R, C]``, bfloat16, float16 or float32.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      block: rows and columns of a complete block.
      sums: the layouts that get ``Quantized.sums``.
      dtype: the dtype of the codes.
      **options: the roundings and the offset of ``reference.quantize``.

    Returns:
      The codes of the shard, and the scales of all blocks that the devices along
      ``intra_block_axes`` hold together.  The sums are upper bounds.
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
        x,
        seeds,
        block=tile,
        amax_reduce=lambda _: amax_of_tiles,
        dtype=dtype,
        **options,
    )
    scales, _ = reference.scale_of_codes(amax, dtype)

    def layout(
        codes: jax.Array, scales: jax.Array, name: str, length: int
    ) -> Quantized:
        bound = jnp.full_like(scales, 127.0 * length) if name in sums else None
        return Quantized(codes, scales, bound)

    return Layouts(
        rowwise and layout(rowwise.codes, scales, "rowwise", block[1]),
        colwise and layout(colwise.codes, scales.mT, "colwise", block[0]),
    )


def _tile_side(assignment: ShardAssignment, factor: str, size: int, side: int) -> int:
    return math.gcd(size, side) if factor in assignment.intra_block_axes else side


def _amax_of_blocks(
    assignment: ShardAssignment, tiles: tuple[int, int], x: jax.Array
) -> jax.Array:
    """The maxima of complete blocks, given those of this device's tiles."""
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
    """The maximum of the block around each tile of this device; has shape ``shape``."""
    for axis, factor, count in zip((1, 2), "ij", tiles, strict=True):
        if names := assignment.intra_block_axes.get(factor):
            tile = lax.axis_index(names) * shape[axis] + jnp.arange(shape[axis])
            x = jnp.take(x, tile // count, axis, mode="clip")
    return x
