"""Layers between Linen and NNX, and models without values."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge

from fbq_jax import FallbackDot, Recipe, assert_live
from fbq_jax.nnx import FallbackDot as NNXDot
from fbq_jax.nnx import fallback_stats, name_layers

RECIPE = Recipe(block=32)
X = jax.random.normal(jax.random.key(0), (64, 64))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, dot_general=FallbackDot(RECIPE), name="up")(x)
        return nn.Dense(64, dot_general=FallbackDot(RECIPE), name="down")(x)


def test_linen_layers_in_an_nnx_model_have_stats():
    dense = nn.Dense(64, dot_general=FallbackDot(RECIPE))
    linen = [bridge.ToNNX(module, rngs=nnx.Rngs(0)) for module in (Mlp(), dense)]
    dot = NNXDot(RECIPE, rngs=nnx.Rngs(1))
    model = nnx.Sequential(
        *(bridge.lazy_init(module, X) for module in linen),
        nnx.Linear(64, 64, dot_general=dot, rngs=nnx.Rngs(2)),
    )
    before = fallback_stats(model)

    @nnx.jit
    def train(model, x):
        *linen, last = model.layers
        for layer in linen:
            x = layer(x, mutable=["fallback"])
        return last(x)

    own = {"layers/1", "layers/2"}
    assert set(before) == {"layers/0/up", "layers/0/down", *own}
    train(model, X)
    assert_live(before, fallback_stats(model))


def test_linen_ops_in_to_linen_are_named():
    layer = bridge.to_linen(nnx.Linear, 64, 64, dot_general=FallbackDot(RECIPE))
    with pytest.raises(ValueError, match=r"'\(root\)' is an NNX module in ToLinen"):
        jax.eval_shape(layer.init, jax.random.key(0), X)


def test_a_layer_without_values_is_named():
    def build():
        dot = NNXDot(RECIPE, rngs=nnx.Rngs(0))
        return nnx.Sequential(nnx.Linear(64, 64, dot_general=dot, rngs=nnx.Rngs(0)))

    model = nnx.eval_shape(build)
    name_layers(model)
    nnx.update(model, nnx.state(build(), nnx.Param))
    with pytest.raises(ValueError, match=r"layers/0: theta has a shape but no value"):
        model(jnp.ones((64, 64)))
