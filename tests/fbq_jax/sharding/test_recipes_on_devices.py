"""All that devices tell each other in a step of one layer, by each recipe."""

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
from tests.fbq_jax.sharding.test_sharding import assert_close, mesh_of, place
from tests.kernels.test_reference import heavy

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices, or none but CPUs"
)

# Two blocks of tokens on each of eight devices, two of W's rows on each of four.
T, K, N = 8 * 2 * 128, 4 * 2 * 128, 256
W = K * N
CODES_OF_W = [("all-gather", "s8", W)] * 2  # for Y and for dX
# Over fsdp and over data.  XLA makes no reduce-scatter of its own products on CPUs.
SUM = [("reduce-scatter", "f32", W // 4), ("all-reduce", "f32", W // 4)]
XLA_SUM = [("all-reduce", "f32", W), ("all-reduce", "f32", W // 4)]


def words(run):
    return Counter(word[:3] for word in collectives(run))


def scales(*sizes):
    """Gathered: those of blocks, or W's of rows; the last of X's columns, if two."""
    return [("all-gather", "f32", size) for size in sizes]


def maxima(*sizes):
    """Agreed on: of columns of W and dY (N), of X (K), or of whole matrices."""
    return [("all-reduce", "s32", size) for size in sizes]


BLOCKS, BLOCKS_OF_32 = W // 128**2, W // 32**2
# Of X's blocks, where no threshold is set; and whether one of them is not finite.
METRICS = [("all-gather", "f32", T * K // 128**2), ("all-reduce", "pred", 1)]
WORDS = {
    "fallback": [*CODES_OF_W, *SUM, *scales(BLOCKS, BLOCKS), *METRICS],
    "block": [*CODES_OF_W, *SUM, *scales(BLOCKS, BLOCKS)],
    "fallback_rowwise_bwd": [
        *(*CODES_OF_W, *SUM),
        *(*scales(BLOCKS, K, K), *maxima(N, K), *METRICS),
    ],
    "jetfire": [*CODES_OF_W, *SUM, *scales(BLOCKS_OF_32, BLOCKS_OF_32)],
    "switchback": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(1)],
    "switchback_m": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(1)],
    "switchback_q": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(N)],
    "per_tensor": [*CODES_OF_W, *SUM, *scales(K, K), *maxima(1, 1, 1)],
    "per_tensor_bifurcated": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(1, 1, 1)],
    "rowwise": [*CODES_OF_W, *SUM, *scales(K, K), *maxima(N, N, K)],
    "aqt_int8": [*CODES_OF_W, *XLA_SUM, *scales(K), *maxima(N)],
    # Two devices have a shard's halves.
    "aqt_int8_local": [*CODES_OF_W, *SUM, *scales(K), *maxima(N, N, K)],
    # Outliers' products are of floats: of W, and dW's is a sum of its own.
    "llm_int8_dot": [
        *(CODES_OF_W[0], *[("all-gather", "f32", W)] * 2, *scales(K)),
        *(*SUM, SUM[1], ("all-reduce", "f32", W), *maxima(N, N, K)),
        *[("all-reduce", "pred", K)] * 2,
    ],
}


def test_every_recipe_has_its_words():
    assert list(WORDS) == [*recipes.NAMED, "llm_int8_dot"]


@pytest.mark.parametrize("name", WORDS)
def test_kernels_travel_as_codes_and_their_gradient_is_summed_once(name):
    """Activations do not travel; of floats, scales do."""
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
    assert words(run) == Counter(WORDS[name])


@pytest.mark.parametrize(
    ("devices", "agreed", "gathered"),
    [
        (2, (), ()),  # two shards on each
        (8, (64, 32), ()),  # half of one
        (6, (), (768 * 64, 768 * 32)),  # two on three: X and dY in floats
    ],
)
def test_shards_of_tokens(devices, agreed, gathered):
    """Each device multiplies what it has of the four, and dW is that of one device."""
    operands = heavy((1536, 64)), heavy((64, 32), 1), heavy((1536, 32), 2)
    step = functools.partial(
        product, recipe=recipes.aqt_int8_local, key=jax.random.key(0)
    )
    mesh = mesh_of(data=devices)
    specs = ("data",), (), ("data",)
    sharded = [place(mesh, x, *s) for x, s in zip(operands, specs, strict=True)]
    run = jax.jit(step).lower(*sharded).compile()
    assert_close(run(*sharded), jax.jit(step)(*operands))
    want = [("all-reduce", "f32", 64 * 32), *maxima(*agreed), *scales(*gathered)]
    assert words(run) == Counter(want)
