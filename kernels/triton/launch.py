"""Calls of Triton kernels from JAX.

JAX lowers the calls of a program one after the other, and compiles the kernel of each.
So that kernels compile at the same time, other threads start when the calls are traced.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
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

    call = functools.partial(
        jax_triton.triton_call,
        kernel=kernel,
        out_shape=list(outputs),
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
        **constants,
    )
    kinds = tuple(_kind(arg) for arg in (*args, *outputs))
    options = num_warps, num_stages, *sorted(constants.items())
    compilation = _compilations.get((kernel, kinds, options))
    if compilation is None:
        compilation = _threads().submit(_compile, call, _without_values(args))
        _compilations[kernel, kinds, options] = compilation
    return tuple(call(*args, grid=Grid(grid, compilation)))


@dataclasses.dataclass(frozen=True)
class Grid:
    """The number of programs of a kernel that another thread compiles.

    jax-triton calls it when it lowers a call, just before it looks for the compiled
    kernel.

    Attributes:
      programs: the number of programs along each axis.
      compilation: the compilation of the kernel.
    """

    programs: tuple[int, ...]
    compilation: futures.Future[None] = dataclasses.field(compare=False)

    def __call__(self, constants: dict[str, Any]) -> tuple[int, ...]:
        """Waits for the kernel; returns the number of programs."""
        del constants
        # A compilation that has not started is jax-triton's. So is one that failed:
        # jax-triton repeats it, which raises the error.
        if not self.compilation.cancel():
            futures.wait([self.compilation])
        return self.programs


# By what a kernel is compiled for. jax-triton keeps the kernels, by the same.
_compilations: dict[Hashable, futures.Future[None]] = {}


@functools.cache
def _threads() -> futures.Executor:
    workers = max(1, (os.cpu_count() or 1) - 1)
    return futures.ThreadPoolExecutor(workers, "compile-triton")


def _kind(arg: Any) -> Hashable:
    """What the compiler knows of an argument."""
    if isinstance(arg, int):
        return arg == 1, arg.bit_length() > 31
    return arg.dtype


def _without_values(args: Sequence[Any]) -> list[jax.ShapeDtypeStruct | int]:
    """Replaces arrays, which may be traced, by their shapes."""
    return [
        arg if isinstance(arg, int) else jax.ShapeDtypeStruct(arg.shape, arg.dtype)
        for arg in args
    ]


def _compile(
    call: Callable[..., Any], args: Sequence[jax.ShapeDtypeStruct | int]
) -> None:
    """Compiles a kernel, by lowering a program that only calls it."""
    sizes = {i: arg for i, arg in enumerate(args) if isinstance(arg, int)}
    program = jax.jit(
        functools.partial(call, grid=(1,)), static_argnums=tuple(sizes)
    ).trace(*args)
    program.lower(lowering_platforms=("cuda",))


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
