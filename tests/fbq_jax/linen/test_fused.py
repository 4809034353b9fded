"""Fused layers against the same layers in sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fbq_jax import (
    FallbackDot,
    GatedMLP,
    NormDense,
    RMSNorm,
    RulesDot,
    fallback_stats,
    nonlinear,
    recipes,
)
from fbq_jax.core import fused_layers, threshold
from fbq_jax.core.gemms import Spec
from fbq_jax.core.nonlinear import NormSpec
from fbq_jax.recipes.schema import Recipe
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast

TOKENS, K, F, N = 35, 160, 96, 64
MIXED = {"gate_up": recipes.block, "down": recipes.row_block_lhs}


class Unfused(nn.Module):
    """``GatedMLP`` or, if ``hidden`` is 0, ``NormDense`` as separate layers."""

    features: int
    hidden: int
    dot_general: FallbackDot

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dot_general=self.dot_general
        )
        x = RMSNorm(name="norm")(x)
        if not self.hidden:
            return dense(self.features, name="dense")(x)
        gate_up = dense(2 * self.hidden, name="gate_up")(x)
        h = nonlinear.silu_gate(*jnp.split(gate_up, 2, axis=-1))
        return dense(self.features, name="down")(h)


@functools.partial(jax.jit, static_argnums=0)
def train(module, variables, x):
    """One training step: output, gradients and new state."""

    def loss(variables, x):
        y, updates = module.apply(variables, x, mutable=["fallback"])
        return jnp.sum(jnp.sin(jnp.arange(y.size)).reshape(y.shape) * y), (y, updates)

    grad = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)
    (gradients, dx), (y, updates) = grad(variables, x)
    gradients.pop("fallback", None)
    return y, dx, gradients, updates


def with_theta(variables, collection, theta):
    state = dict(variables[collection]["dense"]["dot_general"], theta=theta)
    return {**variables, collection: {"dense": {"dot_general": state}}}


@pytest.mark.parametrize(
    ("hidden", "recipe", "theta", "collection"),
    rows_with_first_fast(
        [
            (0, Recipe(block=32), 8.0, "_overwrite_with_gradient"),
            (F, Recipe(block=(32, 128, 64)), None, "fallback"),
            (F, recipes.jetfire, None, "fallback"),
            (F, recipes.row_block_lhs, None, "fallback"),
            (F, recipes.row_block, None, "fallback"),
            (F, recipes.fp8_row_block_lhs, None, "fallback"),
            (F, MIXED, None, "fallback"),
        ]
    ),
)
def test_fused_modules_equal_the_layers_in_sequence(hidden, recipe, theta, collection):
    """The same variables, outputs, gradients and state after a training step.

    ``theta`` is None where the first step sets the thresholds.
    """
    is_recipe, features = isinstance(recipe, Recipe), K if hidden else N
    dot = FallbackDot(recipe, collection) if is_recipe else RulesDot(recipe)
    module = GatedMLP(F, dot_general=dot) if hidden else NormDense(N, dot_general=dot)
    unfused = Unfused(features, hidden, dot)
    x = heavy((2, TOKENS, K))
    variables = [jax.jit(m.init)(jax.random.key(0), x) for m in (module, unfused)]
    same_shapes = jax.tree.map(lambda a, b: a.reshape(b.shape), *variables)
    jax.tree.map(np.testing.assert_array_equal, same_shapes, variables[1])
    if theta is not None:
        variables = [with_theta(v, collection, jnp.float32(theta)) for v in variables]

    got, want = map(train, (module, unfused), variables, (x, x))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        limit = 1e-5 * np.abs(b).max(initial=0)
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-5, atol=limit)
    state = {collection: got[3 if collection == "fallback" else 2][collection]}
    stats = fallback_stats(state, collection)
    assert len(stats) == (2 if hidden else 1)
    assert all(s.count == 1 for s in stats.values())
    if is_recipe and recipe.criterion is not None:
        assert all(0.0 < s.rate < 1.0 for s in stats.values())


def test_saved_floats_are_only_scales_and_statistics():
    dtype = jnp.bfloat16
    gemm = Spec(Recipe(block=(32, 128, 64)), dtype, dtype, dtype, None)
    spec = fused_layers.FusedSpec((gemm, gemm), NormSpec(False, 1e-5, 10))
    scalars = tuple(
        threshold.Scalars(jnp.float32(1.0), jnp.uint32(seed)) for seed in (5, 6)
    )

    def saving(x, norm_scale, *weights):
        def layer(*operands):
            no_codes = (None,) * len(weights)
            return fused_layers.norm_mlp(spec, *operands, no_codes, scalars)

        return jax.vjp(layer, x, norm_scale, weights, has_aux=True)[1]

    shapes = {(1, TOKENS, K): dtype, (K,): jnp.float32}
    shapes |= {(1, K, 2 * F): dtype, (1, F, N): dtype}
    operands = [jax.ShapeDtypeStruct(*operand) for operand in shapes.items()]
    saved = jax.tree.leaves(jax.eval_shape(saving, *operands))
    codes = {leaf.shape for leaf in saved if leaf.dtype == jnp.int8}
    assert codes == {(1, K, TOKENS), (1, F, TOKENS), (1, K, 2 * F), (1, F, N)}
    words = [leaf for leaf in saved if leaf.dtype == jnp.uint32 and leaf.ndim > 0]
    packed = {(1, TOKENS, 10 * K // 32), (1, 2, TOKENS, 10 * F // 32)}
    assert {leaf.shape for leaf in words} == packed
    floats = [leaf for leaf in saved if leaf.dtype not in (jnp.int8, jnp.uint32)]
    assert max(leaf.size for leaf in floats) <= K  # norm_scale


ROWWISE_BACKWARD = FallbackDot(recipes.fallback_rowwise_bwd)
NOT_DOWN = RulesDot({"gate_up": recipes.block})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (NormDense(8, dot_general=ROWWISE_BACKWARD), "takes .* INT8 block scales in "),
        (GatedMLP(8, dot_general=NOT_DOWN), "takes a recipe; rules have none: down"),
        # A kernel as integers would be zeros.
        (NormDense(8), "x is int32; this layer takes bfloat16"),
        (GatedMLP(8, dtype="float8_e4m3fn"), "x is float8_e4m3fn; this layer takes"),
        (NormDense(8, bits=3), "an integer from 4 to 12; got "),
        (GatedMLP(8, bits=16), "an integer from 4 to 12; got "),
    ],
)
def test_what_layers_do_not_take_is_named(layer, message):
    x = jnp.ones((2, 8), jnp.int32 if "int32" in message else jnp.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        layer.init(jax.random.key(0), x)
