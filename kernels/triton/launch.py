"""Calls of Triton kernels from JAX."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import triton

from fbq_jax.kernels.reference import Block
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.kernels.triton.outputs import BlockOutputs


def launch(
    kernel: triton.JITFunction,
    *args: jax.Array | int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel(*args, *outputs, **constants)`` on a grid of programs.

    The compiler does not fuse a product and a sum into an FMA; a kernel that wants an
    FMA calls ``tl.fma``.

    Args:
      kernel: the kernel.
      *args: the inputs of the kernel.
      outputs: shapes and dtypes of the outputs, whose memory is not initialized.
      grid: the number of programs along each axis.
      num_warps: the number of warps per program.
      num_stages: the depth of the pipeline of loads.
      **constants: the ``tl.constexpr`` arguments of the kernel.

    Returns:
      The outputs.
    """
    # Imported here because jax-triton cannot be imported without a GPU.
    import jax_triton

    return tuple(
        jax_triton.triton_call(
            *args,
            kernel=kernel,
            out_shape=list(outputs),
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=False,
            **constants,
        )
    )


def seed_arguments(seeds: Seeds) -> tuple[jax.Array, ...]:
    """The four arrays of seeds; a single one takes the place of all."""
    return seeds if isinstance(seeds, tuple) else (seeds,) * 4


def launch_on_blocks(
    kernel: triton.JITFunction,
    x: jax.Array,
    *args: jax.Array,
    block: Block,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Runs one program per block of matrices ``[B, R, C]``.

    Args:
      kernel: takes x, args, ``R``, ``C / COLUMN_UNIT`` and outputs; its constants
        include ``r``, ``c`` and ``COLUMN_UNIT``.
      x: ``[B, R, C]``.
      *args: further inputs of the kernel.
      block: rows ``r`` and columns ``c`` of a block.
      **options: further arguments of ``launch``.
    """
    _, rows, columns = x.shape
    # With this constant, the compiler knows that each row starts at a multiple of the
    # unit, and loads that many elements at once.
    unit = math.gcd(columns, 16)
    return launch(
        kernel,
        x,
        *args,
        rows,
        columns // unit,
        grid=(BlockOutputs(x.shape, block).programs,),
        r=block[0],
        c=block[1],
        COLUMN_UNIT=unit,
        **options,
    )
