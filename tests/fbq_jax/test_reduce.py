"""What devices sum gradients in: the words they exchange, and the error of the sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import FLOAT_GEMM, Gemm, Recipe, RecipeError, dot_general
from tests.collectives import collectives
from tests.fbq_jax.test_sharding import SIDE, mesh_of, place

K, N = 256, 128
X = jax.random.normal(jax.random.key(0), (8, 64, K))
W = jax.random.normal(jax.random.key(1), (K, N)) / 16
DY = jax.random.normal(jax.random.key(2), (8, 64, N))
DIMS = (((2,), (0,)), ((), ()))


def gradient(reduce):
    """``(x, w, dy, key) -> dW`` whose parts are summed in ``reduce``."""
    recipe = Recipe(block=SIDE, criterion=None)
    drhs = dataclasses.replace(recipe.drhs, reduce=reduce)
    recipe = dataclasses.replace(recipe, drhs=drhs)

    def function(x, w, dy, key):
        def y(w):
            return dot_general(x, w, DIMS, recipe=recipe, key=key)[0]

        return jax.vjp(y, w)[1](dy)[0]

    return function


def compiled(reduce, mesh, spec):
    """The gradient and its collectives, of a batch cut over all axes but the last."""
    batch = tuple(mesh.shape)[:2]
    w = place(mesh, W, *spec)
    operands = place(mesh, X, batch), w, place(mesh, DY, batch)
    key = jax.random.key(0)
    run = jax.jit(gradient(reduce), out_shardings=w.sharding)
    run = run.lower(*operands, key).compile()
    return lambda key: run(*operands, key), collectives(run)


EXACT = jax.jit(gradient("float32"))  # on one device


def relative(error, exact):
    return float(jnp.linalg.norm(error) / jnp.linalg.norm(exact))


@pytest.mark.parametrize(
    ("sizes", "spec", "stages"),
    [
        ({"data": 4}, (), 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "tensor"), 2),
    ],
    ids=["whole", "cut"],
)
def test_a_sum_in_int8(sizes, spec, stages):
    """Unbiased, and in a quarter of the bytes of float32."""
    sums, words = compiled("int8", mesh_of(**sizes), spec)
    errors = []
    for seed in range(16):
        key = jax.random.key(seed)
        want = EXACT(X, W, DY, key)
        errors.append(sums(key) - want)
        # What INT8 loses of X and dY is 1.6 %.
        assert 0.01 < relative(errors[-1], want) < 0.016 * np.sqrt(stages)
    mean = sum(errors[1:], errors[0]) / len(errors)
    assert relative(mean, want) < 0.02 * np.sqrt(stages / len(errors))

    sent = [w for w in words if w.kind == "all-to-all"]
    shard = W.size if not spec else W.size // 2  # of the axis tensor
    values = [shard, shard // 2][:stages]  # those over data are of what fsdp left
    assert sum(w.bytes for w in sent if w.dtype == "s8") == sum(values)
    assert sum(w.bytes for w in sent if w.dtype == "f32") < 0.01 * sum(values)
    others = [(w.kind, w.size) for w in words if w.kind != "all-to-all"]
    assert others == [("all-gather", values[-1])]


def test_a_sum_in_bfloat16():
    sums, _ = compiled("bfloat16", mesh_of(data=4), ())
    key = jax.random.key(0)
    want = EXACT(X, W, DY, key)
    assert 1e-3 < relative(sums(key) - want, want) < 4e-3


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
