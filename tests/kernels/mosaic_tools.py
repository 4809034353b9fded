"""Runs Mosaic GPU kernels in an interpreter, or compiles them for an H200."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from tests.gpus import h200s

NUM_SMS = 4  # multiprocessors of the interpreted GPU

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"the Mosaic GPU interpreter of jax {jax.__version__} lacks transposed "
    "operands and cluster barriers; install jax 0.11 or newer",
)


class Kernel(NamedTuple):
    """A compiled kernel.

    Attributes:
      ptx: its PTX.
      log: the messages of ptxas.
      registers: registers per thread.
      spills: bytes of registers that are stored to memory.
      shared: bytes of dynamic shared memory.
    """

    ptx: str
    log: str
    registers: int
    spills: int
    shared: int


def interpret(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function and interprets its kernels.

    Memory that a kernel does not write holds NaN or the largest integer.

    Raises:
      Exception: if threads race.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    device = AbstractDevice("NVIDIA H200", num_cores=NUM_SMS, platform="gpu")
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        out = jax.block_until_ready(function(*args, **kwargs))
    # Some versions of JAX raise an error, others print and record the race.
    if interpret_pallas_call.get_races().races_found:
        raise RuntimeError("RACE DETECTED")
    return out


def compile_kernels(function: Callable[..., Any], *args: Any) -> list[Kernel]:
    """Compiles a function for an H200 and returns its Mosaic kernels.

    The result lacks kernels that this process has compiled before.

    Args:
      function: the function to trace.
      *args: its arguments, pytrees of ``jax.ShapeDtypeStruct``.
    """
    sharding = NamedSharding(h200s(1, "x"), PartitionSpec())
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "MOSAIC_GPU_DUMP_TO", folder)
        jax.jit(function).lower(*args).compile()
        return [_read(path) for path in sorted(Path(folder).glob("*.ptx"))]


def _read(ptx: Path) -> Kernel:
    log = ptx.with_suffix(".ptxas").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", log)
    (spills,) = re.findall(r"(\d+) bytes spill stores", log)
    with ptx.with_suffix(".mlir-passes.log").open() as passes:
        sizes = (re.search(r"dynamic_shared_memory_size %c(\d+)_", x) for x in passes)
        shared = next(size[1] for size in sizes if size)
    return Kernel(ptx.read_text(), log, int(registers), int(spills), int(shared))
