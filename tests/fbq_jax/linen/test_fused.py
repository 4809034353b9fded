"""Fused layers against the same layers one after another."""

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
    fallback_stats,
    nonlinear,
    recipes,
)
from fbq_jax.core import fused_layers, matmul_vjp
from fbq_jax.core.dot_general import resolve
from fbq_jax.core.nonlinear import NormSpec
from fbq_jax.kernels import fused_reference
from fbq_jax.recipes.schema import Recipe
from tests.kernels.test_reference import heavy

K, F, N, ROWS = 160, 96, 64, 70
NORM = NormSpec(False, 1e-5, 10)
RECIPES = [Recipe(block=(32, 128, 64)), recipes.jetfire]


def operands(dtype=jnp.float32):
    gain = 1.0 + 0.3 * jax.random.normal(jax.random.key(1), (K,))
    shapes = (1, K, 2 * F), (1, F, N)
    weights = [
        0.1 * jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)
    ]
    return heavy((1, ROWS, K), dtype=dtype), gain, *(w.astype(dtype) for w in weights)


def spec_of(recipe, dtype=jnp.float32):
    return matmul_vjp.Spec(recipe, dtype, dtype, dtype, None)


def unfused_norm_matmul(spec, norm, x, norm_scale, w, theta, seed):
    y = nonlinear.rms_norm(x, norm_scale, epsilon=norm.epsilon, bits=norm.bits)
    theta = resolve(theta, y, spec.recipe, None)
    out, metric = matmul_vjp.matmul(spec, y, w, jnp.maximum(theta, 0.0), seed)
    return out, fused_layers.Measured(theta, metric)


def unfused_gated_mlp(specs, x, norm_scale, w_up, w_down, thetas, seeds):
    gate_up, up = unfused_norm_matmul(
        specs.up, specs.norm, x, norm_scale, w_up, thetas[0], seeds[0]
    )
    h = nonlinear.silu_gate(
        *fused_reference.split_gate_up(gate_up), bits=specs.norm.bits
    )
    theta = resolve(thetas[1], h, specs.down.recipe, None)
    y, metric = matmul_vjp.matmul(
        specs.down, h, w_down, jnp.maximum(theta, 0.0), seeds[1]
    )
    return y, (up, fused_layers.Measured(theta, metric))


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(function, *operands):
    y, pullback, measured = jax.vjp(function, *operands, has_aux=True)
    dy = jax.random.normal(jax.random.key(9), y.shape).astype(y.dtype)
    return y, measured, pullback(dy)


def check(fused_layer, unfused_layer, operands, rtol=1e-5):
    got = outputs_and_gradients(fused_layer, *operands)
    want = outputs_and_gradients(unfused_layer, *operands)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=0)
        )


@pytest.mark.parametrize(
    ("recipe", "theta"), list(zip(RECIPES, [-1.0, 3.0], strict=True))
)
def test_norm_matmul_is_its_parts(recipe, theta):
    x, gain, w, _ = operands()
    scalars = {"theta": jnp.float32(theta), "seed": jnp.uint32(5)}
    layers = [
        functools.partial(layer, spec_of(recipe), NORM, **scalars)
        for layer in (fused_layers.norm_matmul, unfused_norm_matmul)
    ]
    check(*layers, (x, gain, w))


@pytest.mark.parametrize(
    ("recipe", "theta"), list(zip(RECIPES, [-1.0, 3.0], strict=True))
)
def test_gated_mlp_is_its_parts(recipe, theta):
    specs = fused_layers.GatedSpecs(spec_of(recipe), spec_of(recipe), NORM)
    scalars = {
        "thetas": (jnp.float32(theta),) * 2,
        "seeds": (jnp.uint32(5), jnp.uint32(6)),
    }
    layers = [
        functools.partial(layer, specs, **scalars)
        for layer in (fused_layers.gated_mlp, unfused_gated_mlp)
    ]
    check(*layers, operands())


def test_what_is_saved_has_no_floats_but_scales_and_statistics():
    recipe, dtype = RECIPES[0], jnp.bfloat16
    specs = fused_layers.GatedSpecs(
        spec_of(recipe, dtype), spec_of(recipe, dtype), NORM
    )
    thetas, seeds = (jnp.float32(1.0),) * 2, (jnp.uint32(5), jnp.uint32(6))

    def saving(*operands):
        layer = functools.partial(
            fused_layers.gated_mlp, specs, thetas=thetas, seeds=seeds
        )
        return jax.vjp(layer, *operands, has_aux=True)[1]

    saved = jax.tree.leaves(jax.eval_shape(saving, *operands(dtype)))
    codes = {leaf.shape for leaf in saved if leaf.dtype == jnp.int8}
    assert codes == {(1, K, ROWS), (1, F, ROWS), (1, K, 2 * F), (1, F, N)}
    planes = sorted(leaf.shape[2] for leaf in saved if leaf.dtype == jnp.uint8)
    assert planes == sorted([K, K // 4, F, F // 4, F, F // 4])
    floats = [leaf for leaf in saved if leaf.dtype not in (jnp.int8, jnp.uint8)]
    assert max(leaf.size for leaf in floats) <= K  # the gain


DOT = FallbackDot(Recipe(block=32))


class Unfused(nn.Module):
    """What ``GatedMLP`` or, without ``hidden``, ``NormDense`` stands for."""

    features: int
    hidden: int = 0
    dot_general: FallbackDot = DOT

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


@pytest.mark.parametrize(
    ("gated", "collection"), [(False, "_overwrite_with_gradient"), (True, "fallback")]
)
def test_modules_are_those_one_after_another(gated, collection):
    """The same variables, outputs, gradients and state after training."""
    dot = FallbackDot(Recipe(block=32), collection=collection)
    module = GatedMLP(40, dot_general=dot) if gated else NormDense(48, dot_general=dot)
    other = Unfused(48, 40 if gated else 0, dot_general=dot)
    x = heavy((2, 20, 48))
    init = [jax.jit(m.init)(jax.random.key(0), x) for m in (module, other)]
    flat = jax.tree.map(lambda a, b: a.reshape(b.shape), *init)
    jax.tree.map(np.testing.assert_array_equal, flat, init[1])

    @functools.partial(jax.jit, static_argnums=0)
    def train(module, variables, x):
        def loss(variables, x):
            y, updates = module.apply(variables, x, mutable=["fallback"])
            return jnp.sum(y * y), (y, updates)

        grad = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)
        (variables, dx), (y, updates) = grad(variables, x)
        kept = variables.pop("fallback", None)
        assert (kept is None) == (collection != "fallback")
        return y, dx, variables, updates

    got, want = (train(m, v, x) for m, v in zip((module, other), init, strict=True))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a = a.reshape(b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    state = {collection: got[3 if collection == "fallback" else 2][collection]}
    assert len(fallback_stats(state, collection)) == 1 + gated
    assert all(s.count == 1 for s in fallback_stats(state, collection).values())


def test_a_recipe_that_cannot_be_fused_is_named():
    dot = FallbackDot(recipes.fallback_rowwise_bwd)
    with pytest.raises(ValueError, match="takes a recipe with block scales in all"):
        NormDense(8, dot_general=dot).init(jax.random.key(0), jnp.ones((2, 8)))
