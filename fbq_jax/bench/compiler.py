"""Compiles the Triton kernels that an op launches, for any NVIDIA GPU and without one.

This needs ``triton``, whose package includes NVIDIA's assembler and disassembler.
"""

import contextlib
import functools
import importlib.util
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax

_TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int8": "*i8",
    "uint8": "*u8",
    "float8_e4m3fn": "*fp8e4nv",
    "int32": "*i32",
    "uint32": "*u32",
}


class CompiledKernel(NamedTuple):
    """A compiled kernel.

    Attributes:
      name: of the function.
      ptx: the assembly.
      cubin: the binary.
      shared: bytes of shared memory of a program.
      registers: registers of a thread.
      spills: bytes of registers that a thread spills.
      num_warps: warps of a program.
    """

    name: str
    ptx: str
    cubin: bytes
    shared: int
    registers: int
    spills: int
    num_warps: int


def is_installed() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


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

    calls: list[tuple[launch.Call, Sequence[jax.Array]]] = []

    def record(call: launch.Call, arrays: Sequence[jax.Array]) -> None:
        calls.append((call, arrays))

    with mock.patch.object(launch, "compile_ahead", record):
        jax.eval_shape(functools.partial(op, **options), *args)
    return [_compile(call, arrays, capability) for call, arrays in calls]


def _compile(call: Any, arrays: Sequence[jax.Array], capability: int) -> CompiledKernel:
    """Compiles as jax-triton does: arrays align to 16 bytes, and 1 is a constant.

    Args:
      call: a ``fbq_jax.kernels.triton.launch.Call``.
      arrays: its arrays.
      capability: the compute capability times ten.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, dict(call.constants), {}
    names = call.kernel.arg_names
    inputs = (*call.arguments(arrays), *call.outputs)
    for i, (name, arg) in enumerate(zip(names, inputs, strict=False)):
        if not isinstance(arg, int):
            signature[name] = _TYPES[str(arg.dtype)]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif arg == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if arg < 2**31 else "i64"
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in names}
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
        compiled = triton.compile(
            ASTSource(call.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options={
                "num_warps": call.num_warps,
                "num_stages": call.num_stages,
                "enable_fp_fusion": False,
            },
        )
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    (spills,) = re.findall(r"(\d+) bytes spill stores", log.getvalue())
    return CompiledKernel(
        name=compiled.metadata.name,
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        shared=compiled.metadata.shared,
        registers=int(registers),
        spills=int(spills),
        num_warps=compiled.metadata.num_warps,
    )
