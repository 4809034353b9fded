"""Layers without blocks compile for meshes of TPUs, which exchange INT8."""

import jax
import jax.numpy as jnp
import pytest

from fbq_jax import dot_general, recipes
from fbq_jax.sharding import layer_names
from tests.collectives import collectives
from tests.kernels import tpu_tools
from tests.kernels.quantize_cases import near
from tests.kernels.tpu_tools import needs_compiler, on_tpu  # noqa: F401 (a fixture)

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_tpu")]
SHAPE = M, K, N = 2048, 1024, 1024


@pytest.fixture(autouse=True)
def partitioned(monkeypatch):
    """Programs for several TPUs warn once that they run as jax.numpy code."""
    monkeypatch.setattr(layer_names, "_warned", {})


def exchanged(program):
    """What travels, without sums and scales."""
    found = collectives(program)
    sums = "all-reduce", "reduce-scatter"
    return [x[:3] for x in found if x.kind not in sums and x.bytes > 2**17]


@pytest.mark.parametrize("generation", ["v5e", "v5p"])
def test_fsdp_gathers_the_weight_twice_in_int8(generation):
    mesh = tpu_tools.mesh_of(generation, tpu_tools.FSDP)
    with pytest.warns(UserWarning, match="jax.numpy code in this program for several"):
        program = tpu_tools.compile_layer(mesh, recipes.rowwise, SHAPE)
    assert exchanged(program) == [("all-gather", "s8", K * N)] * 2


def test_tensor_parallel_layers_gather_nothing():
    mesh = tpu_tools.mesh_of("v5e", tpu_tools.TENSOR)
    with pytest.warns(UserWarning, match="jax.numpy code in this program for several"):
        program = tpu_tools.compile_layer(mesh, recipes.rowwise, SHAPE)
    assert exchanged(program) == []
    sums = [x[1:3] for x in collectives(program) if x.bytes > 2**17]
    assert sorted(sums) == sorted([("s32", M // 2 * K), ("s32", K * N // 4)])  # dX, dW


def test_jit_alone_says_what_to_do():
    mesh = tpu_tools.mesh_of("v5e", tpu_tools.FSDP)
    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(None, "data")
    )
    x = jax.ShapeDtypeStruct((1, 256, 256), jnp.bfloat16, sharding=sharding)

    def quantize(x):
        from fbq_jax import ops

        seeds = jnp.zeros(1, jnp.uint32)
        return ops.quantize(x, seeds, rowwise=near(128, 128), colwise=None)

    with pytest.raises(NotImplementedError, match=r"^quantize: .* jax\.shard_map"):
        jax.jit(quantize).lower(x)


def test_kernels_compile_in_shard_map():
    mesh = tpu_tools.mesh_of("v5e", {"data": 8})
    split = jax.sharding.PartitionSpec("data")
    specs = split, jax.sharding.PartitionSpec()

    def layer(x, w):
        return dot_general(x, w, (((1,), (0,)), ((), ())), theta=2.0)[0]

    arguments = [
        jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec)
        )
        for shape, spec in zip([(M, K), (K, N)], specs, strict=True)
    ]
    mapped = jax.shard_map(
        layer, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False
    )
    text = jax.jit(mapped).lower(*arguments).compile().as_text()
    assert "%fbq_matmul" in text
