"""TPU kernels without a TPU: run by Pallas' interpreter, or compiled."""

import functools
import importlib.util
import os

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)
# By the name of a generation, the smallest topology with it.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets the kernels of a test."""
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", call)


def compile_for(generation, function, *shapes):
    """Compiles a function for a TPU, given the shapes and dtypes of its arguments."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # There is no TPU to ask.
    topology = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu")
    mesh = Mesh(topology.devices[:1], ("all",))
    everywhere = NamedSharding(mesh, P())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes
    )
    # Kernels ask the mesh for the generation.
    with use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*arguments).compile()
