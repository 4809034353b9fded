"""Programs for CPUs are small, and no larger for degenerate shapes.

The more instructions a program has, the longer it compiles.  A product per block, group
or shard makes programs that compile for minutes.  The number of instructions shows that
sooner than the time, and without noise.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from fbq_jax import Gemm, Recipe, dot_general, ragged_dot, recipes
from tests.marks import rows_with_first_fast, with_first_fast

MATMUL = (((1,), (0,)), ((), ()))
USUAL = 256, 256, 256
# M, K and N.  The shortest is less than any number of shards.
DEGENERATE = {
    "one row": (1, 64, 64),
    "K of 1": (64, 1, 64),
    "one column": (64, 64, 1),
    "one value": (1, 1, 1),
    "few rows": (3, 64, 64),
    "many rows": (8192, 64, 64),
    "long K": (64, 8192, 64),
    "many columns": (64, 64, 8192),
}


def in_shards(shards):
    drhs = Gemm(scales="row", rhs="stochastic", shards=shards)
    return dataclasses.replace(recipes.rowwise, drhs=drhs)


RECIPES = {
    "fallback": Recipe(block=32),
    "shards": in_shards(8),
    "jetfire": recipes.jetfire,
    "rowwise": recipes.rowwise,
    "fallback_rowwise_bwd": recipes.fallback_rowwise_bwd,
}
# M, K, N and the number of groups, most of which are empty if there are more than rows.
RAGGED = {
    "one row": (1, 64, 64, 1),
    "more groups than rows": (1, 64, 64, 64),
    "K of 1": (64, 1, 64, 4),
    "one column": (64, 64, 1, 4),
    "many groups": (64, 64, 64, 512),
    "many rows": (2048, 64, 64, 4),
    "long K": (64, 2048, 64, 4),
}


def instructions(dot, *operands):
    """The number of instructions of a product with its gradients."""

    def run(x, w, dy, *rest):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, *rest)[0], x, w)
        return y, vjp(dy)

    return jax.jit(run).lower(*operands).compile().as_text().count(" = ")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def size_of_dense(recipe, m, k, n):
    def dot(x, w, key):
        return dot_general(x, w, MATMUL, recipe=recipe, key=key)

    operands = floats(m, k), floats(k, n), floats(m, n)
    return instructions(dot, *operands, jax.random.key(0))


@functools.cache
def size_of_ragged(m, k, n, groups):
    def dot(x, w, sizes, key):
        return ragged_dot(x, w, sizes, recipe=RECIPES["fallback"], key=key)

    operands = floats(m, k), floats(groups, k, n), floats(m, n)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    return instructions(dot, *operands, sizes, jax.random.key(0))


# The instructions of a product with its gradients, in blocks of 128, plus 10 %.
LARGEST = {"block": 1100, "fallback": 1500, "row_block": 1340, "rowwise": 930}


@pytest.mark.parametrize("name", with_first_fast(LARGEST, 2))
def test_usual_products(name):
    assert size_of_dense(getattr(recipes, name), *USUAL) < LARGEST[name]


@pytest.mark.parametrize(
    ("name", "shape"), rows_with_first_fast(itertools.product(RECIPES, DEGENERATE))
)
def test_degenerate_products(name, shape):
    recipe = RECIPES[name]
    usual = size_of_dense(recipe, *USUAL)
    assert size_of_dense(recipe, *DEGENERATE[shape]) < 1.1 * usual


def test_shards():
    """Eight shards were 2.7 times the program of one, with a product for each."""
    one, eight = (size_of_dense(in_shards(n), *USUAL) for n in (1, 8))
    assert eight < 1.25 * one


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", with_first_fast(RAGGED))
def test_degenerate_groups(shape):
    usual = size_of_ragged(*USUAL, 4)
    assert size_of_ragged(*RAGGED[shape]) < 1.25 * usual
