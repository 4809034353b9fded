"""Compiles the Triton kernels that an op launches, for any NVIDIA GPU and without one.

This needs ``triton``, whose package includes NVIDIA's assembler and disassembler.
"""

import contextlib
import functools
import importlib.util
import io
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

_TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int8": "*i8",
    "uint8": "*u8",
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


class _Launch(NamedTuple):
    """The arguments of ``jax_triton.triton_call`` that the compiler needs."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


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
    launches: list[_Launch] = []
    with _recording(launches):
        jax.eval_shape(functools.partial(op, **options), *args)
    return [_compile(launch, capability) for launch in launches]


class _NoThreads:
    """Starts no compilation, in place of the threads that ``launch`` compiles in."""

    def submit(self, *_: Any) -> futures.Future[None]:
        return futures.Future()


@contextlib.contextmanager
def _recording(launches: list[_Launch]) -> Iterator[None]:
    """Stands in for jax-triton, which cannot be imported without a GPU."""
    from fbq_jax.kernels.triton import launch

    def triton_call(
        *args: Any,
        kernel: Any,
        out_shape: list[jax.ShapeDtypeStruct],
        grid: Callable[[dict[str, Any]], tuple[int, ...]],
        num_warps: int,
        num_stages: int,
        enable_fp_fusion: bool,
        **constants: Any,
    ) -> list[jax.Array]:
        assert all(n > 0 for n in grid(constants))
        options = {
            "num_warps": num_warps,
            "num_stages": num_stages,
            "enable_fp_fusion": enable_fp_fusion,
        }
        launches.append(_Launch(kernel, (*args, *out_shape), constants, options))
        return [jnp.zeros(output.shape, output.dtype) for output in out_shape]

    stand_in: Any = types.ModuleType("jax_triton")
    stand_in.triton_call = triton_call
    with (
        mock.patch.dict(sys.modules, {"jax_triton": stand_in}),
        mock.patch.dict(launch._compilations, clear=True),
        mock.patch.object(launch, "_threads", _NoThreads),
    ):
        yield


def _compile(launch: _Launch, capability: int) -> CompiledKernel:
    """Compiles as jax-triton does: arrays align to 16 bytes, and 1 is a constant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, dict(launch.constants), {}
    names = launch.kernel.arg_names
    for i, (name, arg) in enumerate(zip(names, launch.args, strict=False)):
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
            ASTSource(launch.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options=launch.options,
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
