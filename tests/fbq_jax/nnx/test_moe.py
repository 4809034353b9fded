"""The mixture of experts for NNX, against Linen's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fbq_jax
from fbq_jax import Gemm, Recipe, Routing
from fbq_jax.nnx import (
    ExpertStats,
    FallbackDot,
    MoEMLP,
    RouterLoss,
    evaluation,
    fallback_stats,
    freeze,
    quantize,
)
from fbq_jax.sharding import layer_names

E, D, F = 5, 24, 32
BLOCK = Recipe(block=32, criterion=None, dlhs=Gemm(), drhs=Gemm())
BALANCED = Routing(E, scores="sigmoid", bias_update_rate=0.01, capacity_factor=0.9)
X = jax.random.normal(jax.random.key(0), (3, 20, D))


def make(routing=BALANCED, **options):
    return MoEMLP(D, routing, F, rngs=nnx.Rngs(0), **options)


def grads_of(layer):
    """Updates the layer, and adds its losses to that of its output."""

    @nnx.jit
    def step(layer, x):
        def loss(layer):
            y = layer(x)
            return jnp.sum(y * y) + layer.load_balance_loss[...] + layer.z_loss[...]

        return nnx.grad(loss)(layer)

    return nnx.to_pure_dict(step(layer, X))


@pytest.mark.parametrize(
    "recipe", [None, pytest.param(BLOCK, marks=pytest.mark.exhaustive)]
)
def test_a_step_is_that_of_linen(recipe):
    layer = make(recipe=recipe)
    dot = None if recipe is None else fbq_jax.FallbackDot(recipe)
    linen = fbq_jax.MoEMLP(BALANCED, F, dot_general=dot)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    state = jax.jit(linen.init)(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, state["params"]) == jax.tree.map(jnp.shape, params)

    @jax.jit
    def step(params):
        def loss(params):
            y, updates = linen.apply(
                {**state, "params": params}, X, mutable=["expert_stats", "losses"]
            )
            losses = jax.tree.leaves(updates["losses"])
            return jnp.sum(y * y) + sum(losses), (updates["expert_stats"], losses)

        return jax.grad(loss, has_aux=True)(params)

    want, (stats, losses) = step(params)
    got = grads_of(layer)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, want
    )
    got = nnx.to_pure_dict(nnx.state(layer, ExpertStats))
    jax.tree.map(np.testing.assert_array_equal, got, dict(stats))
    assert got["dropped"] > 0
    got = jax.tree.leaves(nnx.state(layer, RouterLoss))
    np.testing.assert_allclose(got, losses, rtol=1e-6)


def test_the_parameters_do_not_depend_on_the_recipe():
    one, other = (nnx.state(make(recipe=r), nnx.Param) for r in (None, BLOCK))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_evaluation_leaves_the_bias():
    layer, call = make(), nnx.jit(lambda layer, x: layer(x))
    with evaluation():
        call(layer, X)
    layer.eval()
    call(layer, X)
    for variable in jax.tree.leaves(nnx.state(layer, (ExpertStats, RouterLoss))):
        assert not np.any(variable)
    layer_names.clear()
    with pytest.warns(UserWarning, match="in evaluation mode, so the bias"):
        nnx.eval_shape(nnx.grad(lambda layer: jnp.sum(layer(X))), layer)
    layer.train()
    call(layer, X)
    assert np.any(layer.bias[...])


class Model(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.moe = make()

    def __call__(self, x):
        return self.moe(self.first(x))


def test_rules_and_freeze():
    model, rules = Model(), {"first|moe/down": None, ".*": BLOCK}
    by_kind = quantize(model, rules, rngs=nnx.Rngs(1))
    traced = quantize(model, rules, X, rngs=nnx.Rngs(1))
    for report in (by_kind, traced):
        assert [p.parameter for p in report.products] == ["moe/gate_up/kernel"]
        assert report.layers == {
            "first": "first|moe/down",
            "moe/down": "first|moe/down",
            "moe/gate_up": ".*",
        }
    assert list(fallback_stats(model)) == ["moe/gate_up"]

    frozen = freeze(model, X)
    assert isinstance(frozen.moe.gate_up.dot_general, FallbackDot)
    assert frozen.moe.gate_up.dot_general.weight.get_value().mT.shape == (E, D, 2 * F)
    assert len(jax.tree.leaves(nnx.state(frozen, nnx.Param))) == 4
    model.eval()
    call = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(call(frozen, X), call(model, X))


@pytest.mark.exhaustive
def test_layers_of_a_stack_have_states_of_their_own():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stack(rngs):
        return MoEMLP(D, BALANCED, F, rngs=rngs)

    layers = stack(nnx.Rngs(0))
    quantize(layers, {".*": BLOCK}, rngs=nnx.Rngs(1))

    @nnx.vmap(in_axes=(0, None))
    def forward(layer, x):
        return layer(x)

    assert forward(layers, X).shape == (2, *X.shape)
    for projection in (layers.gate_up, layers.down):
        assert projection.dot_general.count[...].tolist() == [1, 1]
        first, second = projection.dot_general.seed[...].tolist()
        assert first != second


def test_the_width_precedes_the_routing():
    with pytest.raises(TypeError, match=f"takes a Routing, .*; got {D}"):
        MoEMLP(BALANCED, D, F, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"takes an ExpertSharding, .*; got 'expert'"):
        MoEMLP(D, BALANCED, F, rngs=nnx.Rngs(0), expert_sharding="expert")
