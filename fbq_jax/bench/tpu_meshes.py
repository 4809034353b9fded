"""What the devices of a TPU mesh exchange in a training step of a linear layer."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import recipes
from fbq_jax.bench import matmuls, report
from fbq_jax.bench.collectives import collectives
from fbq_jax.recipes.schema import Recipe

# Eight devices of each generation.
TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
FSDP = {"data": 2, "fsdp": 4}
TENSOR = {"data": 2, "tensor": 4}
LAYER = 8192, 4096, 4096  # M, K, N
# What is smaller than this is added up in one row, such as scales and maxima.
_SMALL = 2**18


def cases() -> Iterator[tuple[str, Mapping[str, int], str]]:
    """The generation, the mesh and the recipe of each program."""
    for name in ("bf16", *recipes.NAMED):
        yield "v5e", FSDP, name
    for name in ("bf16", "rowwise", "fallback"):
        yield "v5e", TENSOR, name
        yield "v5p", FSDP, name
        yield "v5p", TENSOR, name


def mesh_of(generation: str, sizes: Mapping[str, int]) -> Mesh:
    """A mesh of eight devices that are not here.

    Args:
      generation: a key of ``TOPOLOGIES``.
      sizes: the devices along each axis.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # There is no TPU to ask.
    topology = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu")
    devices: Any = np.array(topology.devices)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def compile_layer(
    mesh: Mesh, recipe: Recipe | None, shape: tuple[int, int, int] = LAYER
) -> Any:
    """Compiles a layer's output and gradients for a mesh.

    Tokens are sharded over "data" and "fsdp", the weight's rows over "fsdp", and its
    columns over "tensor".  The weight and its gradient are bfloat16.

    Args:
      mesh: has some of these axes.
      recipe: the recipe of the layer; None for bf16.
      shape: M, K and N.
    """
    M, K, N = shape

    def array(shape: tuple[int, ...], *axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        spec = P(*(tuple(n for n in names if n in mesh.shape) for names in axes))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    tokens = "data", "fsdp"
    x, w = array((M, K), tokens, ()), array((K, N), ("fsdp",), ("tensor",))
    dy = array((M, N), tokens, ("tensor",))
    shardings = dy.sharding, x.sharding, w.sharding
    layer = jax.jit(matmuls.all_products(recipe), out_shardings=shardings)
    return layer.lower(x, w, dy).compile()


def row(generation: str, sizes: Mapping[str, int], name: str) -> dict[str, Any]:
    """The collectives of a layer by the recipe of this name, or by bf16."""
    mesh = mesh_of(generation, sizes)
    found = Counter(collectives(compile_layer(mesh, recipes.NAMED.get(name))))
    return {
        "generation": generation,
        "mesh": dict(sizes),
        "what": name,
        "shape": LAYER,
        "collectives": [
            {"kind": x.kind, "dtype": x.dtype, "bytes": x.bytes, "count": count}
            for x, count in sorted(found.items())
        ],
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of these rows."""
    text = (
        "**What eight TPUs exchange**, read from the compiled programs: a linear layer "
        f"of M, K, N = {', '.join(map(str, LAYER))} in bfloat16, forward and backward. "
        "MiB are those that each device has after a collective; the last column adds "
        "up what is smaller than 256 KiB, which is scales and maxima."
    )
    head = ["TPU", "mesh", "recipe", "collectives, MiB each", "smaller, MiB"]
    return f"{text}\n\n{report.table(head, map(_cells, rows))}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    large = [x for x in row["collectives"] if x["bytes"] >= _SMALL]
    small = sum(x["bytes"] * x["count"] for x in row["collectives"] if x not in large)
    texts = [
        f"{x['count']} x {x['kind']} {x['dtype']} {x['bytes'] / 2**20:g}" for x in large
    ]
    mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    return [
        row["generation"],
        mesh,
        row["what"],
        "; ".join(texts),
        f"{small / 2**20:.2g}",
    ]
