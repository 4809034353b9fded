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
LINEN = nn.Dense(4)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: fbq_jax.quantize(model, RULES, jax.random.key(0), X),
        lambda model: fbq_jax.freeze(model, {"params": {}}, X),
    ],
    ids=["quantize", "freeze"],
)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nnx.Linear(8, 4, rngs=nnx.Rngs(0)), r"the NNX model Linear: use fbq_jax\.nnx"),
        (nn.Dense, r"got the class Dense$"),
        ({"params": {}}, r"takes a Linen model, .*; got dict$"),
    ],
    ids=["nnx", "class", "variables"],
)
def test_linen_functions_take_linen_models(call, model, message):
    with pytest.raises(TypeError, match=message):
        call(model)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fbq_jax.nnx.quantize(LINEN, RULES, X, rngs=nnx.Rngs(0)),
        lambda: fbq_jax.nnx.freeze(LINEN, X),
        lambda: fbq_jax.nnx.fallback_stats(LINEN),
    ],
    ids=["quantize", "freeze", "fallback_stats"],
)
def test_nnx_functions_take_nnx_models(call):
    with pytest.raises(TypeError, match=r"the Linen model Dense: use fbq_jax\.[qf]"):
        call()


def test_fallback_stats_takes_variables():
    with pytest.raises(TypeError, match=r"nnx\.fallback_stats an NNX .*; got Linear"):
        fbq_jax.fallback_stats(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"takes an NNX model, an .*; got dict$"):
        fbq_jax.nnx.fallback_stats({"fallback": {}})


def test_freeze_takes_variables_after_the_model():
    with pytest.raises(TypeError, match=r"variables after the model, .*; got Array"):
        fbq_jax.freeze(LINEN, X)
