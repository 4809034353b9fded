"""Descriptions of GPUs, for which XLA compiles without having one."""

import functools
import importlib.util
import os
import tempfile
import types
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from fbq_jax.ops import dispatch
from fbq_jax.ops.backends import Mosaic, Triton

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs jax-cuda13-plugin, XLA's compiler for GPUs",
)


def h200s(number: int, axis: str) -> Mesh:
    """Returns a mesh of H200s in one machine, to compile for."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
        topology=f"1x1x{number}",
    )
    return topologies.make_mesh(topology, (number,), (axis,))


def compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ops call Triton kernels as they do on an H200."""
    pytest.importorskip("jax_triton")
    monkeypatch.setenv("PATH", f"{_assembler().name}:{os.environ['PATH']}")
    device = types.SimpleNamespace(compute_capability="9.0")
    for backend in (Triton, Mosaic):
        monkeypatch.setattr(backend, "refusal", lambda *_: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")


@functools.cache
def _assembler() -> tempfile.TemporaryDirectory[str]:
    """A folder with Triton's assembler, which knows the PTX that Triton writes."""
    from triton.backends.nvidia.compiler import get_ptxas

    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "ptxas").symlink_to(get_ptxas(90).path)
    return folder
