"""State and injection in Flax NNX, under each transformation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fbq_jax import Recipe, assert_live, recipes
from fbq_jax.nnx import (
    FallbackConv,
    FallbackDot,
    FallbackEinsum,
    FallbackState,
    evaluation,
    fallback_stats,
    freeze,
    name_layers,
    quantize,
)
from tests import oracle

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


def test_faster_steps_compute_the_same():
    """Their calls do not walk through the model."""
    model, expected = Mlp(nnx.Rngs(1)), Mlp(nnx.Rngs(1))
    step = nnx.cached_partial(train_step, model)
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
    def gradients(call):
        model = Mlp(nnx.Rngs(1))
        loss = nnx.grad(lambda model: jnp.sum(call(model, X) ** 2))
        grads = nnx.jit(loss)(model)
        assert fallback_stats(model)["up"].count == 1
        return grads

    plain, remat = map(gradients, (Mlp.__call__, nnx.remat(Mlp.__call__)))
    chex.assert_trees_all_close(plain, remat, rtol=1e-4, atol=1e-5)


def test_scan_over_layers():
    build = nnx.split_rngs(splits=2)(nnx.vmap(Mlp, in_axes=0, out_axes=0))

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


def einsums(rngs):
    """Two layers, and the name of their op."""
    up = nnx.Einsum("ebd,edf->ebf", (2, 64, 24), (2, 24), rngs=rngs)
    return up, nnx.Einsum("ebf,efd->ebd", (2, 24, 64), rngs=rngs), "einsum_op"


def convolutions(rngs):
    conv = functools.partial(nnx.Conv, dtype=jnp.bfloat16, rngs=rngs)
    deep = conv(8, 8, (3, 3), feature_group_count=2)
    return conv(64, 8, (2, 2), 2), deep, "conv_general_dilated"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "kind"), [(einsums, FallbackEinsum), (convolutions, FallbackConv)]
)
def test_einsums_and_convolutions_keep_their_state(make, kind):
    x = X.reshape(2, 8, 8, 64) if kind is FallbackConv else X.reshape(2, 64, 64)
    up, down, op = make(nnx.Rngs(0))
    model, floats = nnx.Sequential(up, down), nnx.Sequential(*make(nnx.Rngs(0))[:2])
    report = quantize(model, {".*": RECIPE}, quantize_rngs=nnx.Rngs(1))
    assert report.layers == {"layers/0": ".*", "layers/1": ".*"}
    assert isinstance(getattr(up, op), kind)
    forward(model, x)
    stats = fallback_stats(model)
    assert [int(s.count) for s in stats.values()] == [1, 1]
    frozen = freeze(model, x)
    model.eval()
    y, exact = forward(model, x), floats(x)
    np.testing.assert_array_equal(forward(frozen, x), y)
    assert 1e-4 < oracle.relative(y, exact) < 0.03

    setattr(down, op, getattr(up, op))
    with pytest.raises(
        ValueError, match=f"'layers/0' and 'layers/1' share one {kind.__name__}"
    ):
        fallback_stats(model)
    quantize(model, {".*": None})
    np.testing.assert_array_equal(model(x), exact)
