"""State and injection in Flax NNX, under each transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fbq_jax import Recipe, assert_live, recipes
from fbq_jax.nnx import (
    FallbackDot,
    FallbackState,
    evaluation,
    fallback_stats,
    name_layers,
    quantize,
)
from tests.marks import with_first_fast

RECIPE = Recipe(block=32)
X = jax.random.normal(jax.random.key(0), (128, 64))


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def linear(inputs, outputs):
            dot = FallbackDot(RECIPE, rngs=rngs)
            return nnx.Linear(inputs, outputs, dot_general=dot, rngs=rngs)

        self.up, self.down = linear(64, 96), linear(96, 64)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(x)))


@nnx.jit
def train_step(model, x):
    def loss(model):
        return jnp.mean((model(x) - 1.0) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    return value


@nnx.jit
def forward(model, x):
    return model(x)


def test_jit_and_grad_move_the_state_of_each_layer():
    model = Mlp(nnx.Rngs(1))
    before = fallback_stats(model)
    losses = [float(train_step(model, X)) for _ in range(10)]
    after = fallback_stats(model)
    assert_live(before, after)
    assert losses[-1] < losses[0]
    assert set(after) == {"up", "down"}
    assert after["up"].count == 10
    assert after["up"].theta != after["down"].theta
    assert model.up.dot_general.seed[...] != model.down.dot_general.seed[...]


def bound_step(model):
    """A step whose calls do not walk through the model."""
    return nnx.cached_partial(train_step, model)


def split_step(model):
    """A step of a pure function; it copies the state into the model."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def pure(state, x):
        merged = nnx.merge(graphdef, state)
        value = train_step(merged, x)
        return nnx.state(merged), value

    def step(x):
        nonlocal state
        state, value = pure(state, x)
        nnx.update(model, state)
        return value

    return step


@pytest.mark.parametrize("faster", with_first_fast([bound_step, split_step]))
def test_faster_steps_compute_the_same(faster):
    model, expected = Mlp(nnx.Rngs(1)), Mlp(nnx.Rngs(1))
    step = faster(model)
    for _ in range(2):
        assert step(X) == train_step(expected, X)
    assert fallback_stats(model)["up"].count == 2
    actual, exact = nnx.state(model), nnx.state(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, exact)


def test_evaluation_freezes_what_runs_inside():
    """Also a function that was compiled for training, and one that it decorates."""
    model = Mlp(nnx.Rngs(1))
    forward(model, X)
    before = jax.tree.map(jnp.copy, nnx.state(model, FallbackState))
    assert len(jax.tree.leaves(before)) == 2 * 4
    with evaluation():
        forward(model, X)
    nnx.jit(evaluation()(lambda model: model(X)))(model)
    model.eval()
    forward(model, X)
    if hasattr(nnx, "view"):
        forward(nnx.view(model, use_running_average=True), X)
    after = nnx.state(model, FallbackState)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    model.train()
    forward(model, X)
    assert fallback_stats(model)["up"].count == 2


def test_remat_updates_once_and_gives_the_same_gradients():
    def gradients(remat):
        model = Mlp(nnx.Rngs(1))

        def loss(model):
            call = nnx.remat(Mlp.__call__) if remat else Mlp.__call__
            return jnp.sum(call(model, X) ** 2)

        grads = nnx.jit(nnx.grad(loss))(model)
        return jax.tree.leaves(grads), fallback_stats(model)["up"].count

    (plain, count), (remat, remat_count) = gradients(False), gradients(True)
    assert count == remat_count == 1
    for a, b in zip(plain, remat, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_scan_over_layers():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs):
        return Mlp(rngs)

    @nnx.jit
    def scan(layers, x):
        return nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(x, layers)

    layers = build(nnx.Rngs(1))
    scan(layers, X)
    stats = fallback_stats(layers)
    assert stats["up"].count.tolist() == [1, 1]
    assert np.unique(stats["up"].theta).size == 2
    assert np.unique(layers.up.dot_general.seed[...]).size == 2


def test_transformations_of_jax_keep_the_state_inside():
    """An error, unless the recipe has no use for a state."""
    model = Mlp(nnx.Rngs(1))
    name_layers(model)
    call = nnx.jit(lambda model, x: jax.checkpoint(model)(x))
    for trace in (call, lambda model, x: jax.jit(model)(x)):
        with pytest.raises(ValueError, match=r"cannot leave the jax.jit, .* nnx.jit"):
            trace(model, X)
    expected = nnx.jit(lambda model, x: model(x))
    quantize(model, {".*": recipes.rowwise})
    np.testing.assert_array_equal(call(model, X), expected(model, X))


def test_a_shared_instance_is_named():
    model = Mlp(nnx.Rngs(1))
    model.down.dot_general = model.up.dot_general
    with pytest.raises(ValueError, match=r"layers '.*' and '.*' share one FallbackDot"):
        fallback_stats(model)


def test_bad_options_are_named():
    with pytest.raises(TypeError, match="takes a Recipe"):
        FallbackDot("fallback")
    with pytest.raises(TypeError, match=r"rngs takes an nnx\.Rngs"):
        FallbackDot(rngs=jax.random.key(0))


def test_each_dot_of_a_module_is_listed():
    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = FallbackDot(RECIPE), FallbackDot(RECIPE)

    assert set(fallback_stats(Two())) == {"a", "b"}


@pytest.mark.exhaustive
def test_attention_with_a_dot_for_each_projection():
    model = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    for layer in (model.query, model.key, model.value, model.out):
        layer.dot_general = nnx.data(FallbackDot(RECIPE))
    forward(model, X.reshape(2, 64, 64))
    stats = fallback_stats(model)
    assert {name: int(s.count) for name, s in stats.items()} == dict.fromkeys(
        ("query", "key", "value", "out"), 1
    )
