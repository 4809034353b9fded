"""Descriptions of GPUs, for which XLA compiles without having one."""

import importlib.util
import types
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from fbq_jax.ops import dispatch
from fbq_jax.ops.backends import Mosaic, Triton

_EMPTY_KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel() { ret; }
"""

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


def replace_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ops call empty Triton kernels, as they call their own on an H200."""
    launch = pytest.importorskip("fbq_jax.kernels.triton.launch")
    device = types.SimpleNamespace(compute_capability="9.0")
    metadata = types.SimpleNamespace(name="kernel", num_warps=4, shared=0)
    compiled = types.SimpleNamespace(metadata=metadata)
    monkeypatch.setattr(launch.Call, "compile", lambda *_: compiled)
    monkeypatch.setattr(launch.Call, "ptx", lambda *_: _EMPTY_KERNEL)
    for backend in (Triton, Mosaic):
        monkeypatch.setattr(backend, "refusal", lambda *_: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
