"""Every collective of a training step of one layer, by recipe."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import llm_int8_dot, recipes
from tests.collectives import collectives
from tests.fbq_jax.core.test_dot_general import MATMUL, product
from tests.fbq_jax.sharding.tools import assert_close, mesh_of, needs_devices, place
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

pytestmark = needs_devices

# Two blocks of tokens on each of eight devices, two of W's rows on each of four.
T, K, N = 8 * 2 * 128, 4 * 2 * 128, 256
W = K * N
CODES_OF_W = [("all-gather", "s8", W)] * 2  # for Y and for dX
# Over fsdp, then over data.  On CPUs XLA reduce-scatters none of its own products.
SUM = [("reduce-scatter", "f32", W // 4), ("all-reduce", "f32", W // 4)]
XLA_SUM = [("all-reduce", "f32", W), ("all-reduce", "f32", W // 4)]


def count(run):
    return Counter(found[:3] for found in collectives(run))


def scales(*sizes):
    """Gathers of W's scales, of blocks or of K rows, and of X's K columns."""
    return [("all-gather", "f32", size) for size in sizes]


def maxima(*sizes):
    """Reductions of maxima of N columns of W and dY, K columns of X, or matrices."""
    return [("all-reduce", "s32", size) for size in sizes]


BLOCKS, BLOCKS_OF_32 = W // 128**2, W // 32**2
ALL_IN_BLOCKS = [*CODES_OF_W, *SUM, *scales(BLOCKS, BLOCKS)]
# XLA for CPUs gathers FP8 as float16; in test_gpus.py, XLA for GPUs gathers FP8.
FP8_IN_BLOCKS = [*[("all-gather", "f16", W)] * 2, *SUM, *scales(BLOCKS, BLOCKS)]
COLLECTIVES = {
    "fallback": ALL_IN_BLOCKS,
    "block": ALL_IN_BLOCKS,
    "fallback_rowwise_bwd": [
        *(*CODES_OF_W, *SUM),
        *(*scales(BLOCKS, K, K), *maxima(N, K)),
    ],
    "row_block": ALL_IN_BLOCKS,
    "row_block_lhs": ALL_IN_BLOCKS,
    "fp8_row_block": FP8_IN_BLOCKS,
    "fp8_row_block_lhs": FP8_IN_BLOCKS,
    "jetfire": [*CODES_OF_W, *SUM, *scales(BLOCKS_OF_32, BLOCKS_OF_32)],
    "switchback": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(1)],
    "switchback_m": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(1)],
    "switchback_q": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(N)],
    "per_tensor": [*CODES_OF_W, *SUM, *scales(K, K), *maxima(1, 1, 1)],
    "per_tensor_bifurcated": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(1, 1, 1)],
    "rowwise": [*CODES_OF_W, *SUM, *scales(K, K), *maxima(N, N, K)],
    "aqt_int8": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(N)],
    # Two devices share the rows that have a scale of their own.
    "aqt_int8_local": [*CODES_OF_W, *SUM, *scales(K), *maxima(N, N, K)],
    # The outliers' products gather W in floats, and add a second sum for dW.
    "llm_int8_dot": [
        *(CODES_OF_W[0], *[("all-gather", "f32", W)] * 2, *scales(K)),
        *(*SUM, SUM[1], ("all-reduce", "f32", W), *maxima(N, N, K)),
        *[("all-reduce", "pred", K)] * 2,
    ],
}


def test_every_recipe_is_covered():
    assert list(COLLECTIVES) == [*recipes.NAMED, "llm_int8_dot"]


@pytest.mark.parametrize("name", with_first_fast(COLLECTIVES))
def test_kernels_travel_as_codes_and_their_gradient_is_summed_once(name):
    """Activations do not travel; the only floats that do are scales."""
    mesh = mesh_of(data=2, fsdp=4)

    def step(x, w, dy):
        if name in recipes.NAMED:
            return product(x, w, dy, recipe=recipes.NAMED[name], theta=2.0)
        y, vjp = jax.vjp(lambda x, w: llm_int8_dot(x, w, MATMUL), x, w)
        return y, *vjp(dy)

    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in [
            ((T, K), P(("data", "fsdp"))),
            ((K, N), P("fsdp")),
            ((T, N), P(("data", "fsdp"))),
        ]
    )
    shardings = dy.sharding, x.sharding, w.sharding
    run = jax.jit(step, out_shardings=shardings).lower(x, w, dy).compile()
    assert count(run) == Counter(COLLECTIVES[name])


SHARDED_TOKENS = heavy((1536, 64)), heavy((64, 32), 1), heavy((1536, 32), 2)


@pytest.fixture(scope="module")
def step_and_results():
    """A step of the recipe that shards tokens, and what one device computes."""
    step = functools.partial(
        product, recipe=recipes.aqt_int8_local, key=jax.random.key(0)
    )
    return step, jax.jit(step)(*SHARDED_TOKENS)


@pytest.mark.parametrize(
    ("devices", "reduced", "gathered"),
    [
        pytest.param(2, (), (), marks=pytest.mark.exhaustive),  # two shards on each
        (8, (64, 32), ()),  # half of one
        # Two on three: X and dY in floats.
        pytest.param(6, (), (768 * 64, 768 * 32), marks=pytest.mark.exhaustive),
    ],
)
def test_the_recipe_that_shards_tokens(devices, reduced, gathered, step_and_results):
    """Each device multiplies its part of the four shards; dW is that of one device."""
    step, want = step_and_results
    mesh = mesh_of(data=devices)
    specs = ("data",), (), ("data",)
    pairs = zip(SHARDED_TOKENS, specs, strict=True)
    sharded = [place(mesh, x, *spec) for x, spec in pairs]
    run = jax.jit(step).lower(*sharded).compile()
    assert_close(run(*sharded), want)
    found = [("all-reduce", "f32", 64 * 32), *maxima(*reduced), *scales(*gathered)]
    assert count(run) == Counter(found)
