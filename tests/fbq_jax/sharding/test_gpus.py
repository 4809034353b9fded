"""Layers on several GPUs compile, and compute what one GPU computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import dot_general, ops, recipes
from fbq_jax.kernels.quantized import Layout, Quantized, Term
from tests.collectives import collectives
from tests.fbq_jax.core.test_dot_general import MATMUL, product
from tests.fbq_jax.sharding.test_sums_in_int32 import with_reduce
from tests.fbq_jax.sharding.tools import assert_close, mesh_of, place
from tests.gpus import compile_for_hopper, h200s, needs_compiler
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

SEEDS = jnp.zeros(1, jnp.uint32)


def compile_for_gpus(function, *shapes):
    """Compiles for four GPUs, each with a quarter of the arrays' second axis."""
    sharding = NamedSharding(h200s(4, "data"), P(None, "data"))
    args = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes)
    return jax.jit(function).lower(*args).compile()


@needs_compiler
@pytest.mark.usefixtures("reference_everywhere")
@pytest.mark.parametrize("op", with_first_fast(["quantize", "matmul"]))
def test_results_can_be_broadcast(op):
    """XLA for GPUs rewrites such a broadcast before Shardy sees it."""

    def stretched(x):
        rows = (1, None)
        layout = Layout("nearest", rows)
        lhs = ops.quantize(x, SEEDS, rowwise=layout, colwise=None).rowwise
        result = lhs.scales
        if op == "matmul":
            term = Term(jnp.ones((1, 8, 64), jnp.int8), jnp.ones((1, 8, 1)))
            result = ops.matmul(lhs, Quantized(term, None, rows), dtype=jnp.float32)
        return lax.broadcast_in_dim(result, (*result.shape, 5), (0, 1, 2))

    compile_for_gpus(stretched, (1, 512, 64))


@needs_compiler
@pytest.mark.parametrize(
    "name", with_first_fast(["fallback", "row_block_lhs", "rowwise", "jetfire"])
)
def test_kernels_on_shards_compile(monkeypatch, name):
    """Each draws the noise at the offset of its shard."""
    compile_for_hopper(monkeypatch)

    def step(x, w, dy):
        return product(x[0], w[0], dy[0], recipe=recipes.NAMED[name])

    shapes = (1, 512, 512), (1, 512, 128), (1, 512, 128)
    assert "triton_kernel_call_ffi" in compile_for_gpus(step, *shapes).as_text()


def product_in_int32(x, w):
    """The product of ``rowwise``, which devices sum in INT32."""
    recipe = with_reduce(recipes.rowwise)
    return dot_general(x, w, MATMUL, recipe=recipe)[0]


@needs_compiler
def test_products_are_summed_in_int32(monkeypatch):
    compile_for_hopper(monkeypatch)
    mesh = h200s(4, "tensor")
    x, w = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in (((256, 512), P(None, "tensor")), ((512, 128), P("tensor")))
    )
    run = jax.jit(product_in_int32).lower(x, w).compile()
    sums = {(c.kind, c.dtype) for c in collectives(run) if c.size >= 64 * 128}
    assert sums <= {("all-reduce", "s32"), ("reduce-scatter", "s32")}
    assert sums


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.usefixtures("reference_everywhere")
def test_fp8_codes_travel_as_fp8():
    """Those of W, for Y and for dX; X and dY stay on their devices."""
    mesh = h200s(4, "fsdp")

    def step(x, w, dy):
        return product(x, w, dy, recipe=recipes.fp8_row_block)

    rows = NamedSharding(mesh, P("fsdp"))
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        for shape in ((2048, 1024), (1024, 256), (2048, 256))
    )
    run = jax.jit(step, out_shardings=(rows,) * 3).lower(x, w, dy).compile()
    gathers = [c for c in collectives(run) if c.kind == "all-gather"]
    codes = [c.size for c in gathers if c.dtype == "f8e4m3fn"]
    assert codes.count(w.size) == 2
    assert max(c.size for c in gathers if c.dtype != "f8e4m3fn") < w.size // 1000


several_gpus = pytest.mark.skipif(
    jax.device_count() < 2, reason="needs several devices"
)


@pytest.mark.gpu
@several_gpus
def test_each_gpu_draws_its_own_noise_in_shard_map():
    devices = jax.device_count()
    x, w, dy = (heavy(s, i) for i, s in enumerate([(256, 384), (384, 256), (256, 256)]))

    def local(x, w, dy):
        key = jax.random.key(0)
        _, dx, dw = product(x, w, dy, recipe=recipes.fallback, theta=100.0, key=key)
        return dx[None], dw[None]

    specs = {"in_specs": (P(), P(), P()), "out_specs": P("data")}
    mesh = mesh_of(data=devices)
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))
    for gradient in mapped(x, w, dy):
        drawn = np.asarray(gradient).reshape(devices, -1)
        assert len(np.unique(drawn, axis=0)) == devices


@pytest.mark.gpu
@several_gpus
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_in_int32_have_the_bits_of_one_gpu(dtype):
    x, w = heavy((256, 1024)).astype(dtype), heavy((1024, 384), 1).astype(dtype)
    mesh = mesh_of(tensor=jax.device_count())
    sharded = place(mesh, x, None, "tensor"), place(mesh, w, "tensor")
    got, want = (jax.jit(product_in_int32)(*xs) for xs in (sharded, (x, w)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@several_gpus
@pytest.mark.parametrize("name", recipes.NAMED)
@pytest.mark.parametrize("blocks", ["whole", "split"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.filterwarnings("ignore:quantize.*scales are all-reduced:UserWarning")
def test_layer(name, blocks, dtype):
    """FSDP, which shards W's rows between blocks or splits blocks."""
    devices = jax.device_count()
    rows = {"whole": 2 * 128, "split": 128 + 64}[blocks]
    tokens, inputs, outputs = devices * 256, devices * rows, 384
    operands = [
        heavy(shape, seed).astype(dtype)
        for seed, shape in enumerate(
            [(tokens, inputs), (inputs, outputs), (tokens, outputs)]
        )
    ]
    mesh = mesh_of(fsdp=devices)
    sharded = [place(mesh, x, "fsdp") for x in operands]

    def step(x, w, dy):
        recipe = recipes.NAMED[name]
        return product(x, w, dy, recipe=recipe, theta=100.0, key=jax.random.key(0))

    got = jax.jit(step, out_shardings=sharded[0].sharding)(*sharded)
    # In bfloat16 each device rounds its partial sum of dW.
    rtol = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}[dtype]
    assert_close(got, jax.jit(step)(*operands), rtol=rtol)
