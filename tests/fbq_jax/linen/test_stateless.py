"""Recipes without a threshold need no state: their noise may come from a key."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fbq_jax import FallbackDot, GatedMLP, Int8MLP, Recipe, RulesDot, freeze, recipes
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = pytest.mark.usefixtures("every_cause_warns")
X = jax.random.normal(jax.random.key(0), (6, 40))
BLOCK = Recipe(block=32, criterion=None)
DOT = FallbackDot(BLOCK)
NEAREST = recipes.rowwise
FORWARD_NOISE = dataclasses.replace(
    BLOCK, fwd=dataclasses.replace(BLOCK.fwd, lhs="stochastic")
)
KEY = jax.random.key(7)


def dense(recipe):
    return nn.Dense(24, use_bias=False, dot_general=FallbackDot(recipe))


@functools.lru_cache
def params_of(model):
    return jax.jit(model.init)(jax.random.key(1), X)["params"]


def grad(model, params, **options):
    def loss(params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, X, **options)))

    return jax.grad(loss)(params)


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), a, b))


@pytest.mark.parametrize("recipe", with_first_fast([BLOCK, NEAREST]))
def test_evaluation_needs_parameters_only(recipe):
    model = dense(recipe)
    variables = model.init(jax.random.key(1), X)
    want = model.apply(variables, X)
    np.testing.assert_array_equal(model.apply({"params": variables["params"]}, X), want)


def test_the_noise_is_that_of_the_key_of_the_layer():
    """As ``dot_general`` draws it from the key that Flax makes for the layer."""

    class Key(nn.Module):
        @nn.compact
        def __call__(self):
            return self.make_rng("fbq")

    model = dense(FORWARD_NOISE)
    key = Key().apply({}, rngs={"fbq": KEY})
    variables = model.init(jax.random.key(1), X)
    params = {"params": variables["params"]}
    got = model.apply(params, X, rngs={"fbq": KEY})
    # A layer with state folds its count, which is 0, and where in the call it is.
    variables["fallback"]["dot_general"]["seed"] = jax.random.bits(key, (), jnp.uint32)
    np.testing.assert_array_equal(got, model.apply(variables, X))
    assert not same(got, model.apply(params, X, rngs={"fbq": key}))


def test_layers_and_products_have_their_own_noise():
    """Also two products of one layer, and the layers of a stack."""
    w = jax.random.normal(KEY, (40, 40))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            steps = self.variable("cache", "steps", lambda: jnp.int32(0))
            steps.value += 1
            dot, numbers = FallbackDot(FORWARD_NOISE), (((1,), (0,)), ((), ()))
            return jnp.stack([dot(x, w, numbers), dot(x, w, numbers)])

    rngs = {"fbq": True}
    axes = {"cache": 0}
    stack = nn.vmap(Model, axes, in_axes=None, axis_size=3, split_rngs=rngs)()
    # Collections of others may be mutable.
    y, updates = stack.apply({}, X, rngs={"fbq": KEY}, mutable=["cache"])
    assert sorted(updates) == ["cache"]
    y = np.asarray(y).reshape(6, -1)
    assert len(np.unique(y, axis=0)) == 6


def test_state_that_is_given_counts_and_the_key_does_not():
    model = dense(BLOCK)
    variables = model.init(jax.random.key(1), X)

    def step(params, **options):
        def loss(params):
            y, updates = model.apply(
                {**variables, "params": params}, X, mutable=["fallback"], **options
            )
            return jnp.sum(jnp.sin(y)), updates

        return jax.grad(loss, has_aux=True)(params)

    grads, updates = step(variables["params"])
    assert int(updates["fallback"]["dot_general"]["count"]) == 1
    assert same((grads, updates), step(variables["params"], rngs={"fbq": KEY}))


def test_training_without_state_and_key_is_warned_about_once():
    model = dense(BLOCK)
    params = params_of(model)
    with pytest.warns(
        UserWarning, match=r"without the collection 'fallback'.*'fbq': k"
    ):
        first = grad(model, params)
    assert same(first, grad(model, params))


@pytest.mark.parametrize(
    ("recipe", "rngs"),
    rows_with_first_fast(
        [(BLOCK, {"fbq": KEY}), (NEAREST, {}), (recipes.switchback, {})], 2
    ),
)
def test_with_a_key_or_without_noise_training_is_silent(recipe, rngs):
    grad(dense(recipe), params_of(dense(recipe)), rngs=rngs)


def test_a_scan_that_drops_the_stream_is_warned_about():
    def scanned(**streams):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                scan = nn.scan(
                    lambda layer, x, _: (layer(x), None),
                    variable_axes={"params": 0, "fallback": 0},
                    split_rngs={"params": True, **streams},
                    length=2,
                )
                dot = FallbackDot(FORWARD_NOISE)
                layer = nn.Dense(40, use_bias=False, dot_general=dot)
                return scan(layer, x, None)[0]

        run = functools.partial(grad, Stack(), rngs={"fbq": KEY})
        jax.eval_shape(run, params_of(Stack()))

    scanned(fbq=True)
    with pytest.warns(UserWarning, match=r"split_rngs of nn\.scan .* lists 'fbq'"):
        scanned()


def test_remat_draws_the_same_noise_again():
    options = {"rngs": {"fbq": KEY}}
    model = dense(FORWARD_NOISE)
    params = params_of(model)
    remat = nn.remat(nn.Dense)(
        24, use_bias=False, dot_general=FallbackDot(FORWARD_NOISE)
    )
    assert same(*(grad(m, params, **options) for m in (model, remat)))


@pytest.mark.parametrize(
    "model",
    with_first_fast(
        [
            GatedMLP(16, dot_general=DOT),
            nn.Dense(24, dot_general=RulesDot({".*": BLOCK})),
            nn.MultiHeadDotProductAttention(
                2, qkv_dot_general=DOT, out_dot_general=DOT
            ),
            Int8MLP(16),
        ]
    ),
)
def test_every_layer_takes_the_key(model):
    run = jax.jit(functools.partial(grad, model, params_of(model)))
    first, again, other = (run(rngs={"fbq": jax.random.key(n)}) for n in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


def test_a_recipe_with_a_threshold_and_a_frozen_layer_need_their_state():
    model = dense(Recipe(block=32))
    with pytest.raises(ValueError, match="has no state 'dot_general'"):
        model.apply({"params": params_of(model)}, X, rngs={"fbq": KEY})
    model = dense(BLOCK)
    frozen = freeze(model, model.init(jax.random.key(1), X), X)
    with pytest.raises(ValueError, match="is frozen, but has no codes"):
        model.apply({"params": frozen["params"]}, X)
