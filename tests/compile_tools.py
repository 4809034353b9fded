"""Compiles the Triton kernels that an op launches, for any NVIDIA GPU and without one.

This needs ``triton``, whose package includes NVIDIA's assembler and disassembler.
"""

import functools
import io
import re
import subprocess
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.extend.mlir import ir

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
      op: the function. It is lowered, not run.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      capability: the compute capability to compile for times ten, such as 86.
      **options: its static arguments.
    """
    gpu = types.SimpleNamespace(compute_capability=f"{capability / 10}")
    with mock.patch.object(jax, "local_devices", return_value=[gpu]):
        program = jax.jit(functools.partial(op, **options)).trace(*args)
        lowered = program.lower(lowering_platforms=("cuda",))
    return [_assemble(kernel) for kernel in _kernels(lowered.compiler_ir().operation)]


def _kernels(operation: Any) -> Iterator[dict[int, Any]]:
    """The kernels of an operation's calls, as jaxlib describes them for XLA."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _kernels(inner.operation)
    if "call_target_name" in operation.attributes:
        assert "triton_kernel_call_ffi" in str(operation.attributes["call_target_name"])
        config = "backend_config"
        if f"mhlo.{config}" in operation.attributes:  # since jax 0.12
            config = f"mhlo.{config}"
        opaque = ir.DictAttr(operation.attributes[config])["opaque"]
        call = _fields(zlib.decompress(ir.StringAttr(opaque).value_bytes))[1]
        yield _fields(_fields(call)[1])


def _fields(message: bytes) -> dict[int, Any]:
    """The first field of each number of a protocol buffer: integers and bytes."""
    fields: dict[int, Any] = {}
    rest = io.BytesIO(message)

    def integer() -> int:
        total = shift = 0
        while byte := rest.read(1):
            total |= (byte[0] & 127) << shift
            shift += 7
            if byte[0] < 128:
                break
        return total

    while rest.tell() < len(message):
        key, value = integer(), integer()
        fields.setdefault(key >> 3, rest.read(value) if key & 7 == 2 else value)
    return fields


def _assemble(kernel: dict[int, Any]) -> CompiledKernel:
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel[4].decode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
        assembler = get_ptxas(kernel[6]).path
        command = [assembler, "-v", f"--gpu-name={target}", file]
        run = subprocess.run(
            [*command, "-o", Path(folder, "kernel.cubin")],
            check=True,
            capture_output=True,
            text=True,
        )
    (registers,) = re.findall(r"Used (\d+) registers", run.stderr)
    (spills,) = re.findall(r"(\d+) bytes spill stores", run.stderr)
    return CompiledKernel(
        name=kernel[1].decode(),
        ptx=ptx,
        shared=kernel.get(3, 0),
        registers=int(registers),
        spills=int(spills),
        num_warps=kernel[2],
    )
