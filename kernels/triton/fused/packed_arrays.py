"""Packed arrays as arguments and outputs of the fused kernels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fbq_jax.kernels import packing
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Block
from fbq_jax.kernels.triton.outputs import Shape, output

_WIDTHS = (8, 4, 2, 1)  # of chunks


def can_fuse(shape: Shape, block: Block) -> bool:
    """Whether each row of a block is one group of packed codes."""
    return block[1] == packing.GROUP and shape[2] % packing.GROUP == 0


def packed_inputs(packed: Packed, bits: int, unused: jax.Array) -> list[jax.Array]:
    """One plane for each width that a chunk may have, and scales.

    ``unused`` takes the place of missing planes.
    """
    present = dict(zip(packing.chunk_widths(bits), packed.planes, strict=True))
    return [*(present.get(width, unused) for width in _WIDTHS), packed.scales]


def packed_outputs(
    shape: Shape, bits: int, *, wanted: bool = True
) -> list[jax.ShapeDtypeStruct]:
    """One plane for each width that a chunk may have, and scales."""
    *lead, columns = shape
    planes = [
        output((*lead, columns // 8 * width), jnp.uint8, wanted=wanted and bits & width)
        for width in _WIDTHS
    ]
    scales = output((*lead, columns // packing.GROUP), jnp.float32, wanted=wanted)
    return [*planes, scales]


def as_packed(results: Sequence[jax.Array]) -> Packed:
    """The packed array from the outputs of ``packed_outputs``."""
    *planes, scales = results
    return Packed(tuple(plane for plane in planes if plane.ndim == 3), scales)
