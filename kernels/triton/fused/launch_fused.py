"""Launches of the fused kernels, with packed arrays and quantized outputs."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton

from fbq_jax.kernels import packing
from fbq_jax.kernels.fused_reference import Operand
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Block, Criterion, Quantized
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, no_offset
from fbq_jax.kernels.triton.launch import launch
from fbq_jax.kernels.triton.outputs import BlockOutputs, Shape, as_layouts, output

_WIDTHS = (8, 4, 2, 1)  # of chunks


def can_fuse(shape: Shape, block: Block) -> bool:
    """Whether each row of a block is one group of packed codes."""
    aligned = block[1] == packing.GROUP and shape[2] % packing.GROUP == 0
    return aligned and math.prod(shape) > 0


def planes_by_width(packed: Packed, bits: int, unused: jax.Array) -> list[jax.Array]:
    """One plane for each width that a chunk may have; ``unused`` for missing planes."""
    present = dict(zip(packing.chunk_widths(bits), packed.planes, strict=True))
    return [present.get(width, unused) for width in _WIDTHS]


def launch_forward(
    kernel: triton.JITFunction,
    *args: jax.Array,
    shape: Shape,
    seeds: jax.Array,
    saved: int,
    bits: int,
    part_rows: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
) -> tuple[Operand, list[Packed]]:
    """Runs a kernel that writes a quantized output and saves packed arrays.

    Args:
      kernel: the kernel.
      *args: the first arguments of the kernel.
      shape: ``(B, R, C)``, the shape of the output.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      saved: the number of packed arrays ``[B, R, C]``.
      bits: the bits of each packed code.
      part_rows: number of rows of a part of a block.
      block: rows and columns of a block.
      criterion: the criterion of fallback; None for no fallback.
      colwise: the rounding of the colwise codes, or None to omit them.
      global_offset: the offset of this shard in the global matrix; selects its noise.
    """
    out = BlockOutputs(shape, block)
    results = launch(
        kernel,
        *args,
        seeds,
        *(global_offset or no_offset(shape[1])),
        shape[1],
        out.blocks[1],
        outputs=[
            *out.rowwise(),
            *out.rowwise(criterion),
            out.scales,
            *out.colwise(colwise),
            *_packed_outputs(shape, bits) * saved,
        ],
        grid=(out.programs,),
        r=block[0],
        c=block[1],
        PARTS=block[0] // part_rows,
        BITS=bits,
        CRITERION=criterion,
        COLWISE=colwise,
    )
    packed = [_as_packed(results[7 + 5 * k : 12 + 5 * k]) for k in range(saved)]
    return _as_operand(results[:7], shape, criterion), packed


def _packed_outputs(shape: Shape, bits: int) -> list[jax.ShapeDtypeStruct]:
    """One plane for each width that a chunk may have, and scales."""
    *lead, columns = shape
    planes = [
        output((*lead, columns // 8 * width), jnp.uint8, wanted=bits & width)
        for width in _WIDTHS
    ]
    return [*planes, output((*lead, columns // packing.GROUP), jnp.float32)]


def _as_packed(results: Sequence[jax.Array]) -> Packed:
    *planes, scales = results
    return Packed(tuple(plane for plane in planes if plane.ndim == 3), scales)


def _as_operand(results: Sequence[Any], shape: Shape, criterion: str | None) -> Operand:
    main = Quantized(*results[:2])
    colwise = as_layouts(shape, results[:2], results[5:]).colwise
    if criterion is None:
        return Operand(main, None, jnp.zeros((shape[0], 0, 0), jnp.float32), colwise)
    return Operand(main, Quantized(*results[2:4]), results[4], colwise)
