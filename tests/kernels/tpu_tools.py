"""TPU kernels without a TPU."""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from fbq_jax.core.dot_general import dot_general
from fbq_jax.recipes.schema import Recipe

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)


def jitted(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op as one program: each call is traced, and its keywords are static."""

    def run(*operands: Any, **options: Any) -> Any:
        return jax.jit(functools.partial(op, **options))(*operands)

    return run


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets the kernels of a test."""
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", call)


@pytest.fixture
def on_tpu(monkeypatch):
    """Chooses as on a TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


# The smallest topology of a generation, and one of eight devices.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_OF_EIGHT = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
FSDP = {"data": 2, "fsdp": 4}
TENSOR = {"data": 2, "tensor": 4}


def mesh_of(generation: str, sizes: Mapping[str, int]) -> Mesh:
    """A mesh of one or of eight TPUs that are not here.

    Args:
      generation: a key of ``TOPOLOGIES``.
      sizes: the devices along each axis.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # There is no TPU to ask.
    number = math.prod(sizes.values())
    names = TOPOLOGIES if number == 1 else _OF_EIGHT
    devices: Any = topologies.get_topology_desc(names[generation], "tpu").devices
    shape = tuple(sizes.values())
    return Mesh(np.array(devices[:number]).reshape(shape), tuple(sizes))


def lower_for(generation: str, function: Any, *arguments: Any) -> jax.stages.Lowered:
    """Lowers a jitted function for one TPU of a generation, a key of ``TOPOLOGIES``."""
    mesh = mesh_of(generation, {"all": 1})
    everywhere = NamedSharding(mesh, P())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments
    )
    # Kernels ask the mesh for the generation.
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered: jax.stages.Lowered = function.lower(*placed)
    return lowered


def compile_layer(mesh: Mesh, recipe: Recipe, shape: tuple[int, int, int]) -> Any:
    """Compiles a layer's output and gradients for a mesh.

    Tokens are sharded over "data" and "fsdp", the weight's rows over "fsdp", and its
    columns over "tensor".

    Args:
      mesh: has some of these axes.
      recipe: the recipe of the layer.
      shape: M, K and N.
    """
    M, K, N = shape

    def array(shape: tuple[int, ...], *axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        spec = P(*(tuple(n for n in names if n in mesh.shape) for names in axes))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        options = {} if recipe.criterion is None else {"theta": jnp.float32(1.0)}
        dims, key = (((1,), (0,)), ((), ())), jax.random.key(0)
        return dot_general(x, w, dims, recipe=recipe, key=key, **options)[0]

    def layer(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    tokens = "data", "fsdp"
    x, w = array((M, K), tokens, ()), array((K, N), ("fsdp",), ("tensor",))
    dy = array((M, N), tokens, ("tensor",))
    shardings = dy.sharding, x.sharding, w.sharding
    jitted = jax.jit(layer, out_shardings=shardings)
    return jitted.lower(x, w, dy).compile()
