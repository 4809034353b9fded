"""Descriptions of GPUs, for which XLA compiles without having one."""

import importlib.util
from pathlib import Path

import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

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
