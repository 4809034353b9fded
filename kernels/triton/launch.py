"""The one place where a Triton kernel becomes a JAX call."""

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

    Products and sums are not fused into one rounding: a kernel that wants an FMA says
    so.  The outputs are not initialized.
    """
    # Only now: jax-triton cannot be imported where there is no GPU.
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
