"""Compiles the Triton kernels that an op launches, for any NVIDIA GPU and without one.

This needs ``triton``, whose package includes NVIDIA's assembler and disassembler.
"""

import contextlib
import functools
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax

# By compute capability times ten: the most bytes of shared memory of a program, from
# the CUDA C++ Programming Guide.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


class CompiledKernel(NamedTuple):
    """A compiled kernel.

    Attributes:
      name: of the function.
      ptx: the assembly.
      shared: bytes of shared memory of a program.
      registers: registers of a thread.
      spills: bytes of registers that a thread spills.
      num_warps: warps of a program.
    """

    name: str
    ptx: str
    shared: int
    registers: int
    spills: int
    num_warps: int


def compile_kernels(
    op: Callable[..., Any], *args: Any, capability: int, **options: Any
) -> list[CompiledKernel]:
    """Compiles the kernels that a function of ``fbq_jax.kernels.triton`` launches.

    Args:
      op: the function. It is traced, not run.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      capability: the compute capability to compile for times ten, such as 86.
      **options: its static arguments.
    """
    from fbq_jax.kernels.triton import launch
    from fbq_jax.kernels.triton.call import Call

    calls: list[tuple[Call, Sequence[jax.Array]]] = []

    def record(call: Call, arrays: Sequence[jax.Array], **_: Any) -> None:
        calls.append((call, arrays))

    with mock.patch.object(launch, "compile_ahead", record):
        jax.eval_shape(functools.partial(op, **options), *args)
    return [_compile(call, arrays, capability) for call, arrays in calls]


def _compile(call: Any, arrays: Sequence[jax.Array], capability: int) -> CompiledKernel:
    """Compiles the kernel of a call.

    Args:
      call: a ``fbq_jax.kernels.triton.call.Call``.
      arrays: its arrays.
      capability: the compute capability times ten.
    """
    import triton

    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as cache,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        # An empty cache, because a kernel from the cache has no assembler's log.
        triton.knobs.cache.dir = cache
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = call.compile(arrays, capability)
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    (spills,) = re.findall(r"(\d+) bytes spill stores", log.getvalue())
    return CompiledKernel(
        name=compiled.metadata.name,
        ptx=call.ptx(compiled),
        shared=compiled.metadata.shared,
        registers=int(registers),
        spills=int(spills),
        num_warps=compiled.metadata.num_warps,
    )
