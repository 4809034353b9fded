"""What devices sum gradients in: the words they exchange, and the error of the sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import FLOAT_GEMM, Gemm, Recipe, RecipeError, dot_general, recipes
from tests.collectives import collectives
from tests.fbq_jax.sharding.test_sharding import SIDE, mesh_of, place

K, N = 256, 128
X = jax.random.normal(jax.random.key(0), (8, 64, K))
W = jax.random.normal(jax.random.key(1), (K, N)) / 16
DY = jax.random.normal(jax.random.key(2), (8, 64, N))
MATRIX = X, W, DY
ODD = X[..., :65], W[:65, :67], DY[..., :67]
STACK = tuple(x.reshape(4, -1, 128)[:, :128, :64] for x in MATRIX)
# The same tokens on each of four devices: noise that two of them share would show.
ALIKE = tuple(jnp.tile(x[:2], (4, 1, 1)) if x.ndim == 3 else x for x in MATRIX)
DIMS = {2: (((2,), (0,)), ((), ())), 3: (((2,), (1,)), ((0,), (0,)))}


BLOCKS = Recipe(block=SIDE, criterion=None)


def gradient(reduce, recipe=BLOCKS):
    """``(x, w, dy, key) -> dW`` whose parts are summed in ``reduce``."""
    drhs = dataclasses.replace(recipe.drhs, reduce=reduce)
    recipe = dataclasses.replace(recipe, drhs=drhs)

    def function(x, w, dy, key):
        def y(w):
            return dot_general(x, w, DIMS[w.ndim], recipe=recipe, key=key)[0]

        return jax.vjp(y, w)[1](dy)[0]

    return function


def compiled(reduce, mesh, spec, operands=MATRIX, recipe=BLOCKS):
    """The gradient dW and its collectives, of tokens cut over all axes but the last."""
    x, w, dy = operands
    tokens = tuple(mesh.shape)[:2]
    cut = (tokens,) if w.ndim == 2 else (None, tokens)
    operands = place(mesh, x, *cut), place(mesh, w, *spec), place(mesh, dy, *cut)
    key = jax.random.key(0)
    run = jax.jit(gradient(reduce, recipe), out_shardings=operands[1].sharding)
    run = run.lower(*operands, key).compile()
    return lambda key: run(*operands, key), collectives(run)


EXACT = jax.jit(gradient(None))  # on one device


def relative(error, exact):
    return float(jnp.linalg.norm(error) / jnp.linalg.norm(exact))


@pytest.mark.parametrize(
    ("operands", "sizes", "spec", "off", "words"),
    [
        # What is sent as codes, and what shares are gathered.
        (MATRIX, {"data": 4}, (), 0.0130, ([W.size], [W.size])),
        (ODD, {"data": 4}, (), 0.0115, ([68 * 67], [68 * 67])),
        (STACK, {"fsdp": 4}, ("fsdp",), 0.0130, ([4 * 64 * 64], [])),
        (
            ALIKE,
            {"data": 2, "fsdp": 2, "tensor": 2},
            ("fsdp", "tensor"),
            0.0113,
            # Over data what fsdp leaves of what tensor leaves.
            ([W.size // 2, W.size // 4], [W.size // 4]),
        ),
    ],
    ids=["whole", "odd", "stack", "cut"],
)
def test_a_sum_in_int8(operands, sizes, spec, off, words):
    """Unbiased, and in a quarter of the bytes of float32."""
    sums, found = compiled("int8", mesh_of(**sizes), spec, operands)
    errors = []
    for seed in range(16):
        key = jax.random.key(seed)
        want = EXACT(*operands, key)
        errors.append(sums(key) - want)
        assert relative(errors[-1], want) == pytest.approx(off, rel=0.05)
    mean = sum(errors[1:], errors[0]) / len(errors)
    assert relative(mean, want) < 1.5 * off / np.sqrt(len(errors))

    sent, gathered = words
    exchanged = [w for w in found if w.kind == "all-to-all"]
    assert sum(w.bytes for w in exchanged if w.dtype == "s8") == sum(sent)
    scales = sum(w.bytes for w in exchanged if w.dtype == "f32")
    assert scales < 0.01 * sum(sent)
    others = [w for w in found if w.kind != "all-to-all" and w.dtype != "u32"]  # seeds
    assert [(w.kind, w.size) for w in others] == [("all-gather", s) for s in gathered]


def test_what_int8_costs_without_a_sum():
    """More than a sum in INT8 does."""
    exact = jnp.einsum("btk,btn->kn", X, DY)
    error = EXACT(*MATRIX, jax.random.key(0)) - exact
    assert relative(error, exact) == pytest.approx(0.0158, rel=0.02)


def test_a_sum_of_shards_of_the_tokens_in_int8():
    recipe, key = recipes.aqt_int8_local, jax.random.key(0)
    sums, _ = compiled("int8", mesh_of(data=4), (), recipe=recipe)
    want = jax.jit(gradient(None, recipe))(*MATRIX, key)
    assert relative(sums(key) - want, want) == pytest.approx(0.0130, rel=0.05)


@pytest.mark.parametrize("spec", [(), ("data",)], ids=["whole", "cut"])
def test_a_sum_in_bfloat16(spec):
    sums, _ = compiled("bfloat16", mesh_of(data=4), spec)
    key = jax.random.key(0)
    want = EXACT(X, W, DY, key)
    assert 1e-3 < relative(sums(key) - want, want) < 4e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_is_in_the_dtype_of_the_product(dtype):
    operands = tuple(x.astype(dtype) for x in MATRIX)
    key = jax.random.key(0)
    sums = {
        reduce: compiled(reduce, mesh_of(data=4), (), operands)[0](key)
        for reduce in (None, "float32", "bfloat16")
    }
    one_device = EXACT(*operands, key)
    same = {
        reduce: [float(jnp.mean(got == want)) for want in (sums[dtype], one_device)]
        for reduce, got in sums.items()
    }
    assert same[None][0] == 1.0
    # In float32 but for its last bits, which a rounding to bfloat16 seldom shows.
    assert same["float32"][1] > (0.99 if dtype == "bfloat16" else 0.3)
    assert same["bfloat16"][1] < (0.9 if dtype == "bfloat16" else 0.1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"drhs": Gemm(reduce="float16")}, r"drhs.reduce takes one of .*'float16'"),
        ({"dlhs": Gemm(reduce="int8")}, r"dlhs.reduce takes 'int8' only in a drhs"),
        (
            {"drhs": dataclasses.replace(FLOAT_GEMM, reduce="bfloat16")},
            r"drhs.reduce takes nothing .* XLA sums it",
        ),
    ],
)
def test_what_cannot_be_summed_is_named(how, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**how)
