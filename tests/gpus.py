"""Descriptions of GPUs, for which XLA compiles without having one."""

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

if importlib.util.find_spec("triton") is not None:
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    # Triton may write PTX from 3.7 on that only its own assembler knows.  XLA must find
    # one and the same while a process runs.
    if not triton.__version__.startswith("3.6."):
        _assembler = tempfile.TemporaryDirectory()
        Path(_assembler.name, "ptxas").symlink_to(get_ptxas(90).path)
        os.environ["PATH"] = f"{_assembler.name}:{os.environ['PATH']}"

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
    device = types.SimpleNamespace(compute_capability="9.0")
    for backend in (Triton, Mosaic):
        monkeypatch.setattr(backend, "refusal", lambda *_: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
