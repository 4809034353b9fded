"""A mixture of experts against one dense MLP for each expert."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import (
    FallbackDot,
    Gemm,
    MoEMLP,
    Recipe,
    Routing,
    fallback_stats,
    fp8_dot,
    freeze,
    recipes,
)
from fbq_jax.experts.routing import route
from fbq_jax.sharding import layer_names
from tests import oracle
from tests.marks import rows_with_first_fast

E, D, F = 5, 24, 32
NEAREST = Recipe(block=32, dlhs=Gemm(), drhs=Gemm())
BLOCK = dataclasses.replace(NEAREST, criterion=None)
X = jax.random.normal(jax.random.key(0), (3, 20, D))
DY = jax.random.normal(jax.random.key(1), X.shape)
LAYER = MoEMLP(Routing(E), F, bits=None)
PARAMS = jax.jit(LAYER.init)(jax.random.key(2), X)["params"]
BALANCED = Routing(E, top_k=2, scores="sigmoid", bias_update_rate=0.01)


def stats(bias):
    return {"bias": jnp.array(bias, jnp.float32)}


def dense(params, x, routing, bias=None):
    """Every expert computes every token; weights of 0 leave most of them out."""
    tokens = x.reshape(-1, D)
    logits = tokens @ params["router"]["kernel"]
    routes = route(routing, logits, bias)
    one_hot = jax.nn.one_hot(routes.experts, E)
    if (capacity := routing.capacity(len(tokens))) is not None:
        # The rank of each choice among all of the same expert.
        flat = one_hot.reshape(-1, E)
        flat = jnp.where(jnp.cumsum(flat, 0) <= capacity, flat, 0.0)
        one_hot = flat.reshape(one_hot.shape)
    weights = jnp.einsum("tke,tk->te", one_hot, routes.weights)
    hidden = jnp.einsum("td,edf->etf", tokens, params["gate_up"]["kernel"])
    hidden = jax.nn.silu(hidden[..., :F]) * hidden[..., F:]
    y = jnp.einsum("etf,efd->etd", hidden, params["down"]["kernel"])
    return jnp.einsum("etd,te->td", y, weights).reshape(x.shape)


@pytest.mark.exhaustive
def test_each_expert_has_its_own_fallback_rate():
    layer = dataclasses.replace(LAYER, dot_general=FallbackDot(NEAREST))
    state = {
        name: {"dot_general": {"theta": theta, "rate": 0.0, "count": 1, "seed": 2}}
        for name, theta in (("gate_up", 3.2), ("down", 0.1))
    }
    # The tokens of the first example are zero, so that some blocks do not count.
    x = X * jnp.array([0.0, 1.0, 1.0])[:, None, None]
    mutable = ["fallback", "expert_stats", "intermediates"]
    apply = jax.jit(functools.partial(layer.apply, mutable=mutable))
    updates = apply({"params": PARAMS, "fallback": state}, x)[1]
    assert updates["expert_stats"].keys() == {"load", "dropped"}
    (rates,) = updates["intermediates"]["gate_up"]["fallback_rates"]
    # Sorted by expert, the tokens of each lie in their own blocks of 32.
    x = x.reshape(-1, D)
    experts = route(LAYER.routing, x @ PARAMS["router"]["kernel"]).experts
    fell, blocks = np.zeros(E), np.zeros(E)
    for expert in range(E):
        tokens = np.asarray(x)[np.where(experts == expert)[0]]
        for start in range(0, len(tokens), 32):
            largest = np.abs(tokens[start : start + 32]).max()
            fell[expert] += largest > 3.2
            blocks[expert] += largest > 0
    np.testing.assert_allclose(rates, fell / np.maximum(blocks, 1), rtol=1e-6)
    rate = updates["fallback"]["gate_up"]["dot_general"]["rate"]
    assert float(rate) == pytest.approx(fell.sum() / blocks.sum(), rel=1e-6)
    assert 0 < fell.sum() < blocks.sum()
    # Nothing is computed for whoever does not ask, nor by init.
    assert "intermediates" not in layer.init(jax.random.key(2), X)


def output_and_gradients(function):
    @jax.jit
    def run(params, x):
        y, vjp, *aux = jax.vjp(function, params, x, has_aux=True)
        return y, vjp(DY), aux

    return run(PARAMS, X)


def check(layer, bound, bias=None):
    """The layer's output and gradients are within ``bound`` of the dense ones'."""
    variables = {} if bias is None else {"expert_stats": stats(bias)}
    bias = None if bias is None else stats(bias)["bias"]

    def apply(params, x):
        mutable = ["fallback", "expert_stats", "losses"]
        variables_ = {"params": params, **variables}
        return layer.apply(variables_, x, mutable=mutable)

    got, got_grads, (updates,) = output_and_gradients(apply)
    want, want_grads, _ = output_and_gradients(
        lambda params, x: (dense(params, x, layer.routing, bias), ())
    )
    assert oracle.relative(got, want) < bound
    errors = jax.tree.map(oracle.relative, got_grads, want_grads)
    assert max(jax.tree.leaves(errors)) < bound, errors
    return got_grads[0], updates


@pytest.mark.parametrize(
    "routing",
    [
        Routing(E),
        pytest.param(
            Routing(E, top_k=1, renormalize=False), marks=pytest.mark.exhaustive
        ),
        Routing(E, top_k=3, scores="sigmoid", capacity_factor=0.7),
    ],
)
def test_float_experts_are_dense_products(routing):
    _, updates = check(dataclasses.replace(LAYER, routing=routing), 1e-5)
    drops = routing.capacity_factor is not None
    assert (updates["expert_stats"]["dropped"] > 0) == drops
    assert np.sum(updates["expert_stats"]["load"]) == 60 * routing.top_k


def test_experts_without_tokens_and_one_with_all():
    routing = dataclasses.replace(BALANCED, top_k=1, renormalize=False)
    layer = dataclasses.replace(LAYER, routing=routing)
    grads, updates = check(layer, 1e-5, bias=[0.0, 9.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(updates["expert_stats"]["load"], [0, 60, 0, 0, 0])
    idle = grads["gate_up"]["kernel"][jnp.array([0, 2, 3, 4])]
    assert not np.any(idle)


@pytest.mark.parametrize(
    ("recipe", "bound"),
    rows_with_first_fast(
        [
            (NEAREST, 0.03),
            (recipes.rowwise, 0.02),
            (dataclasses.replace(recipes.row_block, block=32), 0.04),
            # FP8 has 3 bits after the leading one.
            (dataclasses.replace(recipes.fp8_row_block, block=32), 0.08),
        ],
        2,
    ),
)
def test_quantized_experts_are_within_the_error_of_a_recipe(recipe, bound):
    layer = MoEMLP(Routing(E), F, dot_general=FallbackDot(recipe))
    layer_names.clear()
    with pytest.warns(UserWarning, match="starts a new one"):
        _, updates = check(layer, bound)
    assert sorted(fallback_stats(updates)) == ["down", "gate_up"]


def test_state_of_a_step():
    layer = dataclasses.replace(LAYER, routing=BALANCED)
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    assert sorted(variables) == ["expert_stats", "params"]
    assert not any(map(np.any, variables["expert_stats"].values()))

    mutable = ["expert_stats", "losses"]
    apply = jax.jit(functools.partial(layer.apply, mutable=mutable))
    _, updates = apply(variables, X)
    new, losses = updates["expert_stats"], updates["losses"]
    logits = X.reshape(-1, D) @ variables["params"]["router"]["kernel"]
    routes = route(BALANCED, logits)
    np.testing.assert_array_equal(new["load"], routes.load)
    np.testing.assert_allclose(new["bias"], 0.01 * np.sign(24 - routes.load))
    assert losses["load_balance"][0] == pytest.approx(routes.load_balance_loss)
    assert losses["z"][0] == pytest.approx(routes.z_loss)

    params = {"params": variables.pop("params")}
    with pytest.raises(ValueError, match=r"'\(root\)' balances .* 'expert_stats': pas"):
        jax.eval_shape(apply, params, X)
    layer_names.clear()
    with pytest.warns(UserWarning, match="'expert_stats' is immutable, so the bias"):
        jax.eval_shape(
            jax.grad(lambda params: jnp.sum(layer.apply({**variables, **params}, X))),
            params,
        )


def test_losses_have_gradients():
    def loss(params, name):
        _, updates = LAYER.apply({"params": params}, X, mutable=["losses"])
        return updates["losses"][name][0]

    for name in ("load_balance", "z"):
        grads = jax.jit(jax.grad(loss), static_argnums=1)(PARAMS, name)
        assert np.any(grads["router"]["kernel"])


class Model(nn.Module):
    dot: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(D, dot_general=self.dot, name="first")(x)
        return MoEMLP(Routing(E), F, dot_general=self.dot, name="moe")(x)


def test_rules_reach_the_experts_and_not_the_router():
    rules = {"first|moe/down": None, ".*": NEAREST}
    model, report = fbq_jax.quantize(Model(), rules, jax.random.key(0), X)
    assert [p.parameter for p in report.products] == ["moe/gate_up/kernel"]
    assert report.layers["moe/down"] == "first|moe/down"
    assert sorted(p.parameter for p in report.float_parameters) == [
        "first/kernel",
        "moe/down/kernel",
        "moe/router/kernel",
    ]
    by_hand = Model(fbq_jax.RulesDot(rules))
    variables = jax.jit(by_hand.init)(jax.random.key(0), X)
    run = [jax.jit(functools.partial(m.apply, variables)) for m in (model, by_hand)]
    np.testing.assert_array_equal(run[0](X), run[1](X))
    unruled = fbq_jax.RulesDot({"first": None})
    report = unruled.report(Model(unruled), jax.random.key(0), X)
    assert report.unmatched_layers == ("moe/gate_up", "moe/down")


def test_frozen_experts_have_the_same_bits():
    layer = MoEMLP(BALANCED, F, dot_general=FallbackDot(BLOCK))
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    frozen = freeze(layer, variables, X)
    codes = frozen["fallback"]["gate_up"]["dot_general"]["weight"].codes
    assert codes.mT.shape == (E, D, 2 * F)
    assert not jax.tree.leaves(frozen["params"]["gate_up"])
    apply = jax.jit(layer.apply)
    np.testing.assert_array_equal(apply(frozen, X), apply(variables, X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dot_general": fp8_dot}, r"with a ragged_dot or None .*; got Fp8Dot"),
        ({"dot_general": recipes.block}, r"FallbackDot.*, not the recipe itself"),
        ({"routing": 8}, r"takes a Routing, .*; got 8"),
        ({"expert_sharding": "expert"}, r"takes an ExpertSharding, .*; got 'expert'"),
    ],
)
def test_bad_options_are_named(options, message):
    layer = dataclasses.replace(LAYER, **options)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(layer.init, jax.random.key(0), X)


def test_a_scan_that_forgets_the_bias_of_experts_is_named():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return MoEMLP(Routing(4, bias_update_rate=0.01), F, name="moe")(x), None

    layers = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    )
    with pytest.raises(ValueError, match=r"'moe' balances .* list it in variable_axes"):
        jax.eval_shape(layers().init, jax.random.key(0), X, None)


DROPPING = Routing(E, scores="sigmoid", bias_update_rate=0.01, capacity_factor=0.9)


def nnx_layer(routing=DROPPING, **options):
    return fbq_jax.nnx.MoEMLP(D, routing, F, rngs=nnx.Rngs(0), **options)


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
def test_a_step_of_nnx_is_that_of_linen(recipe):
    layer = nnx_layer(recipe=recipe)
    dot = None if recipe is None else fbq_jax.FallbackDot(recipe)
    linen = fbq_jax.MoEMLP(DROPPING, F, dot_general=dot)
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
    got = nnx.to_pure_dict(nnx.state(layer, fbq_jax.nnx.ExpertStats))
    jax.tree.map(np.testing.assert_array_equal, got, dict(stats))
    assert got["dropped"] > 0
    got = jax.tree.leaves(nnx.state(layer, fbq_jax.nnx.RouterLoss))
    np.testing.assert_allclose(got, losses, rtol=1e-6)


def test_evaluation_in_nnx_leaves_the_bias():
    layer, call = nnx_layer(), nnx.jit(lambda layer, x: layer(x))
    with fbq_jax.nnx.evaluation():
        call(layer, X)
    layer.eval()
    call(layer, X)
    for variable in jax.tree.leaves(
        nnx.state(layer, (fbq_jax.nnx.ExpertStats, fbq_jax.nnx.RouterLoss))
    ):
        assert not np.any(variable)
    layer_names.clear()
    with pytest.warns(UserWarning, match="in evaluation mode, so the bias"):
        nnx.eval_shape(nnx.grad(lambda layer: jnp.sum(layer(X))), layer)
    layer.train()
    call(layer, X)
    assert np.any(layer.bias[...])


class NnxModel(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.moe = nnx_layer()

    def __call__(self, x):
        return self.moe(self.first(x))


def test_rules_and_freeze_in_nnx():
    model, rules = NnxModel(), {"first|moe/down": None, ".*": BLOCK}
    by_kind = fbq_jax.nnx.quantize(model, rules, quantize_rngs=nnx.Rngs(1))
    traced = fbq_jax.nnx.quantize(model, rules, X, quantize_rngs=nnx.Rngs(1))
    for report in (by_kind, traced):
        assert [p.parameter for p in report.products] == ["moe/gate_up/kernel"]
        assert report.layers == {
            "first": "first|moe/down",
            "moe/down": "first|moe/down",
            "moe/gate_up": ".*",
        }
    assert list(fbq_jax.nnx.fallback_stats(model)) == ["moe/gate_up"]

    frozen = fbq_jax.nnx.freeze(model, X)
    assert isinstance(frozen.moe.gate_up.dot_general, fbq_jax.nnx.FallbackDot)
    assert frozen.moe.gate_up.dot_general.weight.get_value().mT.shape == (E, D, 2 * F)
    assert len(jax.tree.leaves(nnx.state(frozen, nnx.Param))) == 4
    model.eval()
    call = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(call(frozen, X), call(model, X))


def test_the_width_precedes_the_routing():
    with pytest.raises(TypeError, match=f"takes a Routing, .*; got {D}"):
        fbq_jax.nnx.MoEMLP(DROPPING, D, F, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"takes an ExpertSharding, .*; got 'expert'"):
        fbq_jax.nnx.MoEMLP(D, DROPPING, F, rngs=nnx.Rngs(0), expert_sharding="expert")
