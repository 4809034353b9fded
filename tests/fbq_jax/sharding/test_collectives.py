"""Sums of gradients over devices: what the devices exchange, and the sum's error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import FLOAT_GEMM, Gemm, Recipe, RecipeError, dot_general, recipes
from tests.collectives import collectives
from tests.fbq_jax.sharding.test_sharding import SIDE
from tests.fbq_jax.sharding.tools import mesh_of, place
from tests.marks import rows_with_first_fast, with_first_fast

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
    """``(x, w, dy, key) -> dW`` whose partial sums are added in ``reduce``."""
    drhs = dataclasses.replace(recipe.drhs, reduce=reduce)
    recipe = dataclasses.replace(recipe, drhs=drhs)

    def function(x, w, dy, key):
        def y(w):
            return dot_general(x, w, DIMS[w.ndim], recipe=recipe, key=key)[0]

        return jax.vjp(y, w)[1](dy)[0]

    return function


def compiled(function, mesh, spec, operands=MATRIX):
    """A function of tokens sharded over all axes but the last, and its collectives."""
    x, w, dy = operands
    tokens = tuple(mesh.shape)[:2]
    rows = (tokens,) if w.ndim == 2 else (None, tokens)
    operands = place(mesh, x, *rows), place(mesh, w, *spec), place(mesh, dy, *rows)
    run = jax.jit(function, out_shardings=operands[1].sharding)
    run = run.lower(*operands, jax.random.key(0)).compile()
    return lambda key: run(*operands, key), collectives(run)


EXACT = jax.jit(gradient(None))  # on one device


def relative(error, exact):
    return float(jnp.linalg.norm(error) / jnp.linalg.norm(exact))


@pytest.mark.parametrize(
    ("operands", "sizes", "spec", "off", "elements"),
    rows_with_first_fast(
        [
            # Over fsdp the half that tensor leaves, then over data half of that.
            (
                *(ALIKE, {"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "tensor")),
                *(0.0111, ([W.size // 2, W.size // 4], [W.size // 4])),
            ),
            (MATRIX, {"data": 4}, (), 0.0130, ([W.size], [W.size])),
            (ODD, {"data": 4}, (), 0.01145, ([68 * 67], [68 * 67])),
            (STACK, {"fsdp": 4}, ("fsdp",), 0.0130, ([4 * 64 * 64], [])),
        ]
    ),
    ids=["sharded", "whole", "odd", "stack"],
)
def test_a_sum_in_int8(operands, sizes, spec, off, elements):
    """It is unbiased, and takes a quarter of the bytes of float32.

    ``elements`` are the numbers of codes that are sent, and that are gathered.
    """
    sums, found = compiled(gradient("int8"), mesh_of(**sizes), spec, operands)
    errors = []
    for seed in range(8):
        key = jax.random.key(seed)
        want = EXACT(*operands, key)
        errors.append(sums(key) - want)
        assert relative(errors[-1], want) == pytest.approx(off, rel=0.025)
    mean = sum(errors[1:], errors[0]) / len(errors)
    assert relative(mean, want) < 1.5 * off / np.sqrt(len(errors))

    sent, gathered = elements
    exchanged = [c for c in found if c.kind == "all-to-all"]
    assert sum(c.bytes for c in exchanged if c.dtype == "s8") == sum(sent)
    scales = sum(c.bytes for c in exchanged if c.dtype == "f32")
    assert scales < 0.01 * sum(sent)
    others = [c for c in found if c.kind != "all-to-all" and c.dtype != "u32"]  # seeds
    assert [(c.kind, c.size) for c in others] == [("all-gather", s) for s in gathered]


@pytest.mark.exhaustive
def test_a_sum_of_shards_of_the_tokens_in_int8():
    recipe, key = recipes.aqt_int8_local, jax.random.key(0)
    sums, _ = compiled(gradient("int8", recipe), mesh_of(data=4), ())
    want = jax.jit(gradient(None, recipe))(*MATRIX, key)
    assert relative(sums(key) - want, want) == pytest.approx(0.0130, rel=0.05)


def test_a_sum_in_bfloat16_is_scattered():
    sums, _ = compiled(gradient("bfloat16"), mesh_of(data=4), ("data",))
    key = jax.random.key(0)
    want = EXACT(X, W, DY, key)
    assert 1e-3 < relative(sums(key) - want, want) < 4e-3


@pytest.mark.parametrize("dtype", with_first_fast(["float32", "bfloat16"]))
def test_a_sum_is_in_the_dtype_of_the_product(dtype):
    """Or in the dtype that ``Gemm.reduce`` names."""
    operands = tuple(x.astype(dtype) for x in MATRIX)
    key = jax.random.key(0)

    reduces = None, "float32", "bfloat16"

    def gradients(*args):
        return [gradient(reduce)(*args) for reduce in reduces]

    run, _ = compiled(gradients, mesh_of(data=4), (), operands)
    sums = dict(zip(reduces, run(key), strict=True))
    one_device = EXACT(*operands, key)
    same = {
        reduce: [float(jnp.mean(got == want)) for want in (sums[dtype], one_device)]
        for reduce, got in sums.items()
    }
    assert same[None][0] == 1.0
    # The last bits of a sum in float32 differ, which rounding to bfloat16 seldom shows.
    assert same["float32"][1] > (0.99 if dtype == "bfloat16" else 0.3)
    assert same["bfloat16"][1] < (0.9 if dtype == "bfloat16" else 0.1)
    if dtype == "float32":
        error = relative(sums["bfloat16"] - one_device, one_device)
        assert 1e-3 < error < 4e-3


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
def test_an_unsupported_reduce_is_named(how, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**how)
