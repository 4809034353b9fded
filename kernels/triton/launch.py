"""Calls of Triton kernels from JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import triton


def launch(
    kernel: triton.JITFunction,
    *args: jax.Array | int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel(*args, *outputs, **constants)`` on a grid of programs.

    The compiler does not contract a product and a sum to an FMA; a kernel that wants an
    FMA asks for it.

    Args:
      kernel: the kernel.
      *args: its inputs.
      outputs: shapes and dtypes of its outputs, whose memory is not initialized.
      grid: the number of programs along each axis.
      num_warps: the number of warps of a program.
      num_stages: the depth of the pipeline of loads.
      **constants: its ``tl.constexpr`` arguments.

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
