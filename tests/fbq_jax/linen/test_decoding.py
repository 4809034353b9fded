"""Frozen layers with a few rows, which one op quantizes and multiplies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import FallbackDot, ops, recipes
from fbq_jax.kernels.quantized import Unquantized
from fbq_jax.linen.freezing import freeze
from fbq_jax.recipes.schema import Gemm
from tests import oracle
from tests.marks import rows_with_first_fast, with_first_fast

STOCHASTIC = replace(recipes.block, fwd=Gemm(lhs="stochastic"))


@pytest.fixture
def fused(monkeypatch):
    """The recipes' criteria in products that quantize their left operand."""
    calls, op = [], ops.matmul

    def matmul(lhs, *args, **options):
        if isinstance(lhs, Unquantized):
            calls.append(lhs.criterion)
        return op(lhs, *args, **options)

    monkeypatch.setattr(ops, "matmul", matmul)
    return calls


def trained(recipe, rows):
    """A layer, its variables after a training forward, and an activation."""
    layer = nn.Dense(256, dot_general=FallbackDot(recipe), dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (*rows, 300), jnp.bfloat16)
    x = x.at[..., 140].mul(50)  # the second block of three falls back
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    train = jax.jit(lambda variables: layer.apply(variables, x, mutable=["fallback"]))
    _, state = train(variables)
    return layer, {**variables, **state}, x


@pytest.mark.parametrize(
    ("recipe", "rows", "calls"),
    rows_with_first_fast(
        [
            (recipes.fallback, (8,), 1),
            (recipes.fallback, (1, 9), 0),
            (recipes.jetfire, (1, 8), 1),  # two axes of rows
            (recipes.rowwise, (8,), 0),
            (recipes.block, (2, 3), 1),
            (recipes.row_block, (5,), 1),
            (replace(recipes.fallback, criterion="l1"), (8,), 0),
            (recipes.fp8_row_block, (8,), 0),
            (STOCHASTIC, (8,), 0),
        ]
    ),
)
def test_one_op_computes_what_two_do(fused, recipe, rows, calls):
    layer, variables, x = trained(recipe, rows)
    frozen = freeze(layer, variables, x)
    fused.clear()
    got = jax.jit(layer.apply)(frozen, x)
    assert fused == [recipe.criterion] * calls
    want = jax.jit(layer.apply)(variables, x)
    assert len(fused) == calls  # none in a layer that is not frozen
    np.testing.assert_array_equal(got, want)


def test_gradients_take_two_ops(fused):
    layer, variables, x = trained(recipes.fallback, (8,))
    frozen = freeze(layer, variables, x)
    fused.clear()
    jax.eval_shape(jax.grad(lambda x: layer.apply(frozen, x).sum()), x)
    assert not fused


@pytest.mark.parametrize("spec", with_first_fast([P("a", None), P(None, "a")]))
def test_weights_are_sharded(fused, spec):
    """Along K, devices sum the products of their blocks."""
    layer, variables, x = trained(recipes.fallback, (8,))
    x = jnp.tile(x[:, :256], (1, 2))
    variables = layer.init(jax.random.key(1), x) | {"fallback": variables["fallback"]}
    frozen = freeze(layer, variables, x)
    want = jax.jit(layer.apply)(frozen, x)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    weight = frozen["fallback"]["dot_general"]["weight"]
    codes = jax.tree.map(
        lambda y: jax.device_put(y, NamedSharding(mesh, P(None, *spec))), weight
    )
    frozen["fallback"]["dot_general"]["weight"] = codes
    fused.clear()
    got = jax.jit(layer.apply)(frozen, x)
    assert fused
    # Along K, partial sums are rounded to bfloat16.
    assert oracle.relative(got, want) <= (0.0 if spec[0] else 5e-3)
