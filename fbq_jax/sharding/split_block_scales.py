"""Quantization where a block's values are on several devices, which agree on its scale.

A device cuts its shard into parts of blocks, the largest that the shard and a block are
both made of, and tells the others their maxima: a float32 each.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.sharding.assignment import Shards


def quantize_shared(
    shards: Shards, x: jax.Array, seeds: jax.Array, *, block: Block, **options: Any
) -> Layouts:
    """``reference.quantize`` of a shard, by XLA's operations on any device.

    Args:
      shards: which axes of the mesh cut inside blocks of rows, i, and columns, j.
      x: this device's ``[B, R, C]``.
      seeds: as ``reference.quantize``'s, like all that follows.
      block: the sides of a whole one.
      options: the roundings and the origin.

    Returns:
      The shard's codes, and the scales of all blocks that the devices along those axes
      of the mesh have together.
    """

    def part(letter: str, size: int, side: int) -> int:
        return math.gcd(size, side) if letter in shards.inside else side

    parts = part("i", x.shape[1], block[0]), part("j", x.shape[2], block[1])
    in_a_block = block[0] // parts[0], block[1] // parts[1]
    maxima = reference.block_metric(x, block=parts, criterion="absmax")
    amax = _of_blocks(shards, in_a_block, maxima)
    own = _of_parts(shards, in_a_block, amax, maxima.shape)
    layouts = reference.quantize(
        x, seeds, block=parts, amax_reduce=lambda _: own, **options
    )
    scales, _ = scale_and_inverse(amax)
    by_rows, by_columns = layouts
    return Layouts(
        by_rows and Quantized(by_rows.codes, scales),
        by_columns and Quantized(by_columns.codes, scales.mT),
    )


def _of_blocks(shards: Shards, in_a_block: tuple[int, int], x: jax.Array) -> jax.Array:
    """The maxima of blocks, over the devices, of those of parts ``[B, R, C]``."""
    for axis, letter, count in zip((1, 2), "ij", in_a_block, strict=True):
        if names := shards.inside.get(letter):
            x = lax.all_gather(x, names, axis=axis, tiled=True)
            blocks = (*x.shape[:axis], -1, count, *x.shape[axis + 1 :])
            x = find_amax(x.reshape(blocks), axis + 1)
    return x


def _of_parts(
    shards: Shards, in_a_block: tuple[int, int], x: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Of each part on this device, what its block has."""
    for axis, letter, count in zip((1, 2), "ij", in_a_block, strict=True):
        if names := shards.inside.get(letter):
            part = lax.axis_index(names) * shape[axis] + jnp.arange(shape[axis])
            x = jnp.take(x, part // count, axis, mode="clip")
    return x
