"""A model of Flax's other API is an error that names the function for it."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import recipes

X = jnp.ones((4, 8))
RULES = {".*": recipes.block}
LINEN, NNX = nn.Dense(4), nnx.Linear(8, 4, rngs=nnx.Rngs(0))


def quantize(model):
    return fbq_jax.quantize(model, RULES, jax.random.key(0), X)


def freeze(model):
    return fbq_jax.freeze(model, {"params": {}}, X)


LINEN_FUNCTIONS = quantize, freeze
NNX_FUNCTIONS = (
    lambda model: fbq_jax.nnx.quantize(model, RULES, X, quantize_rngs=nnx.Rngs(0)),
    lambda model: fbq_jax.nnx.freeze(model, X),
    fbq_jax.nnx.fallback_stats,
)


@pytest.mark.parametrize(
    ("functions", "model", "message"),
    [
        (LINEN_FUNCTIONS, NNX, r"the NNX model Linear: use fbq_jax\.nnx"),
        (LINEN_FUNCTIONS, nn.Dense, r"got the class Dense$"),
        (LINEN_FUNCTIONS, {"params": {}}, r"takes a Linen model, .*; got dict$"),
        ([fbq_jax.fallback_stats], NNX, r"nnx\.fallback_stats an NNX .*; got Linear"),
        ([lambda m: fbq_jax.freeze(m, X)], LINEN, "after the model, .*; got Array"),
        (NNX_FUNCTIONS, LINEN, r"the Linen model Dense: use fbq_jax\.[qf]"),
        (NNX_FUNCTIONS[2:], {"fallback": {}}, r"takes an NNX model, an .*; got dict$"),
    ],
)
def test_another_kind_of_model_is_named(functions, model, message):
    for function in functions:
        with pytest.raises(TypeError, match=message):
            function(model)
