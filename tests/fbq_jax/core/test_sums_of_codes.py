"""Products whose kernel reads the sums of rhs' codes; the reference stands for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import GatedMLP, Recipe, dot_general, ops, ragged_dot
from fbq_jax.core import threshold
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.frozen_weight import quantize_weight
from fbq_jax.ops.dispatch import Backend
from tests.kernels.quantize_cases import heavy

MATMUL = (((1,), (0,)), ((), ()))
RECIPE = Recipe(block=32)
READS_SUMS = Backend, "reads_sums", lambda *_: True
X, W = heavy((256, 128)), heavy((128, 96), 1)


def with_gradients(function):
    """The output of a function, and its gradients."""

    def run(*args):
        y, vjp = jax.vjp(function, *args)
        return y, vjp(jnp.ones_like(y))

    return run


def options():
    return {"recipe": RECIPE, "theta": 2.0, "key": jax.random.key(0)}


def dense(x, w):
    return dot_general(x, w, MATMUL, **options())[0]


def grouped(x, w):
    sizes = jnp.array([100, 50])
    return ragged_dot(x, jnp.stack([w, -w]), sizes, **options())[0]


def gated(x, w):
    model = GatedMLP(128)
    variables = model.init(jax.random.key(0), x)
    return model.apply(variables, x) + jnp.sum(w)


@pytest.mark.parametrize(
    "function",
    [
        dense,
        pytest.param(grouped, marks=pytest.mark.exhaustive),
        pytest.param(gated, marks=pytest.mark.exhaustive),
    ],
)
def test_sums_change_no_value(monkeypatch, function):
    want = with_gradients(function)(X, W)
    monkeypatch.setattr(*READS_SUMS)
    got = with_gradients(function)(X, W)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rhs_of_every_product_has_the_sums_of_its_codes(monkeypatch):
    products = []

    def matmul(lhs, rhs, **options):
        products.append((lhs, rhs))
        return original(lhs, rhs, **options)

    original = ops.matmul
    monkeypatch.setattr(ops, "matmul", matmul)
    monkeypatch.setattr(*READS_SUMS)
    with_gradients(dense)(X, W)
    assert len(products) == 3
    for lhs, rhs in products:
        assert lhs.sums is None
        codes = np.abs(np.asarray(rhs.codes, np.float32))
        _, rows, depth = codes.shape
        blocks = codes.reshape(1, rows // 32, 32, depth // 32, 32)
        np.testing.assert_array_equal(rhs.sums, blocks.sum(4).max(2))


def test_frozen_weights_are_stored_without_sums(monkeypatch):
    """Weights that any device freezes have the same arrays."""
    monkeypatch.setattr(*READS_SUMS)
    frozen = quantize_weight(DotConfig(RECIPE), threshold.start(RECIPE), W, MATMUL)
    assert frozen.codes.sums is None
