"""The three products at every exponent of X, W and dY, against float64.

``fbq_jax.kernels.reference`` says in which range a product of blocks is exact up to
rounding, what is lost below it, and what happens above.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import Gemm, Recipe, dot_general
from tests import oracle
from tests.marks import rows_with_first_fast

EXPONENTS = np.arange(-149, 128)
SIDE, BLOCK = 64, 32
DIMS = (((2,), (1,)), ((0,), (0,)))
PLAIN = Recipe(block=BLOCK, criterion=None, dlhs=Gemm(), drhs=Gemm())
RECIPES = {"plain": PLAIN, "fallback": dataclasses.replace(PLAIN, criterion="absmax")}
# The exponents of W are paired with all of X and of dY, so steps of 16 give every sum.
CASES = rows_with_first_fast(
    itertools.product(
        reversed(RECIPES), [-110, -126, -118, -6, 0, 40, 127, *range(-149, 128, 16)]
    )
)


def values(exponents, seed):
    """Float32 ``[B, 64, 64]`` with these exponents, whose blocks differ in size."""
    rng = np.random.default_rng(seed)
    shape = len(exponents), SIDE, SIDE
    x = rng.uniform(1.0, 2.0, shape) * rng.choice([-1.0, 1.0], shape)
    x *= 2.0 ** -rng.integers(0, 12, shape)
    tiles = (SIDE // BLOCK,) * 2
    sizes = np.repeat(np.repeat(rng.integers(0, 20, tiles), BLOCK, 0), BLOCK, 1)
    return (x * 2.0 ** (exponents[:, None, None] - 1.0 * sizes)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def products(recipe, x, w, dy):
    def dot(x, w):
        return dot_general(x, w, DIMS, recipe=recipe, theta=0.0)[0]

    y, vjp = jax.vjp(dot, x, w)
    return y, *vjp(dy)


@functools.cache
def terms_of_x(falls_back):
    return terms(values(EXPONENTS, 0), falls_back=falls_back)


def terms(x, *, falls_back=False):
    """The terms of quantized matrices ``[B, R, C]``: values and scales, in float64."""

    def stack(parts):
        codes, scales = (np.stack(part) for part in zip(*parts, strict=True))
        scales = np.repeat(np.repeat(scales.astype(np.float64), BLOCK, 1), BLOCK, 2)
        return codes * scales, scales

    if not falls_back:
        return [stack([oracle.quantize(m, (BLOCK, BLOCK))[:2] for m in x])]
    parts = [oracle.quantize_fallback(m, 0.0, (BLOCK, BLOCK))[:2] for m in x]
    return [stack(part) for part in zip(*parts, strict=True)]


def check(got, lhs, rhs):
    """Checks the products of terms ``[B, M, K]`` and ``[B, K, N]``.

    Rounding errors are those of a product of scales, its product with an integer, and
    of a sum, for each block.
    """
    exact, size, lost, overflows = (np.zeros(got.shape) for _ in range(4))
    for x, x_scale in lhs:
        for w, w_scale in rhs:
            exact += x @ w
            size += np.abs(x) @ np.abs(w)
            for k in range(0, SIDE, BLOCK):  # the scales are constant along a block
                scale = x_scale[:, :, k, None] * w_scale[:, None, k]
                lost += BLOCK * 2.0**-112 * ((scale > 0) & (scale < 2.0**-126))
                overflows += scale >= 2.0**128 * (1 - 2.0**-25)
    finite = np.isfinite(got)
    bound = (len(lhs) * SIDE // BLOCK + 3) * 2.0**-24 * size + lost + 2.0**-126
    assert (np.abs(got - exact) <= bound)[finite].all()
    assert (finite | (overflows > 0) | (size >= 2.0**128 * (1 - 2.0**-20))).all()
    assert not (finite & (np.abs(exact) > 2.0**128 * (1 + 2.0**-20))).any()


@pytest.mark.parametrize(("name", "exponent"), CASES)
def test_products_are_right_or_not_finite(name, exponent):
    x = values(EXPONENTS, 0)
    w = values(np.full(len(EXPONENTS), exponent), 1)
    dy = values(np.random.default_rng(exponent + 149).permutation(EXPONENTS), 2)
    y, dx, dw = (
        np.asarray(z, np.float64)
        for z in products(RECIPES[name], *map(jnp.asarray, (x, w, dy)))
    )
    w_terms, dy_terms = terms(w), terms(dy)
    check(y, terms_of_x(name == "fallback"), w_terms)
    check(dx, dy_terms, [tuple(z.mT for z in term) for term in w_terms])
    check(dw, [tuple(z.mT for z in term) for term in terms_of_x(False)], dy_terms)
