"""Quantization of blocks that are split between devices, with an all-reduced maximum.

A device divides its shard into the largest tiles that divide both the shard and a
block.  It gathers the maxima of the other devices' tiles, one float32 per tile.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import reference
from fbq_jax.kernels.quantized import CodeDtype, Layout, Layouts, Quantized, Term
from fbq_jax.kernels.rounding import Seeds, fold_seeds
from fbq_jax.kernels.scales import find_amax
from fbq_jax.kernels.sources import Matrix
from fbq_jax.sharding.assignment import MeshAxes, ShardAssignment


def quantize_split_blocks(
    assignment: ShardAssignment,
    source: Matrix,
    seeds: Seeds,
    theta: None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    dtype: CodeDtype = "int8",
    **options: Any,
) -> Layouts:
    """``reference.quantize`` for a shard that may end inside a block.

    It runs as XLA ops; there is no kernel.

    Args:
      assignment: the assigned mesh axes; ``intra_block_axes`` split blocks along rows
        ``i`` and columns ``j``.
      source: this device's shard ``[B, R, C]``.
      seeds: the seeds of stochastic rounding, of B matrices.
      theta: None: nothing falls back.
      rowwise: as in ``reference.quantize``, in blocks.
      colwise: as in ``reference.quantize``, in blocks.
      dtype: the dtype of the codes.
      **options: further options of ``reference.quantize``.

    Returns:
      The codes of the shard, and the scales of all blocks that the devices along
      ``intra_block_axes`` hold together.  The sums are upper bounds.
    """
    del theta
    x = source.values

    def quantize(layout: Layout, name: str) -> Quantized:
        r, c = layout.block
        assert r is not None
        assert c is not None
        # The rows and columns that split a block; a single row or column is not split.
        axes = [
            assignment.intra_block_axes.get(factor, ()) if side > 1 else ()
            for factor, side in zip("ij", (r, c), strict=True)
        ]
        sizes = zip(axes, x.shape[1:], (r, c), strict=True)
        tile = [math.gcd(size, side) if names else side for names, size, side in sizes]
        counts = r // tile[0], c // tile[1]  # tiles in a block
        maxima = reference.block_metric(x, block=(tile[0], tile[1]), criterion="absmax")
        amax = _amax_of_blocks(axes, counts, maxima)
        of_tiles = _amax_of_tiles(axes, counts, amax, maxima.shape)
        run: Callable[..., Layouts] = functools.partial(
            reference.quantize,
            source,
            fold_seeds(seeds),
            dtype=dtype,
            amax_reduce=reference.AmaxReduce(*[lambda _: of_tiles] * 2),
            **options,
        )
        of_layouts: dict[str, Layout | None] = {"rowwise": None, "colwise": None}
        of_layouts[name] = Layout(layout.rounding, (tile[0], tile[1]))
        codes = getattr(run(**of_layouts), name).codes
        scales, _ = reference.scale_of_codes(amax, dtype)
        length, block = c, layout.block
        if name == "colwise":
            scales, length, block = scales.mT, r, block[::-1]
        bound = jnp.full_like(scales, 127.0 * length) if layout.sums else None
        return Quantized(Term(codes, scales, bound), None, block)

    return Layouts(
        rowwise and quantize(rowwise, "rowwise"),
        colwise and quantize(colwise, "colwise"),
    )


def _amax_of_blocks(
    axes: Sequence[MeshAxes], counts: tuple[int, int], x: jax.Array
) -> jax.Array:
    """Reduces the maxima of the devices' tiles to the maxima of complete blocks."""
    for axis, (names, count) in enumerate(zip(axes, counts, strict=True), start=1):
        if names:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
            blocks = (*x.shape[:axis], -1, count, *x.shape[axis + 1 :])
            x = find_amax(x.reshape(blocks), axis + 1)
    return x


def _amax_of_tiles(
    axes: Sequence[MeshAxes],
    counts: tuple[int, int],
    x: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """The maximum of the block around each tile of this device; has shape ``shape``."""
    for axis, (names, count) in enumerate(zip(axes, counts, strict=True), start=1):
        if names:
            tile = lax.axis_index(names) * shape[axis] + jnp.arange(shape[axis])
            x = jnp.take(x, tile // count, axis, mode="clip")
    return x
