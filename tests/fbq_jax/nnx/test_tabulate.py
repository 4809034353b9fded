"""``nnx.tabulate`` of models with quantized layers.

It wraps the public functions of all modules' classes, and an error leaves them wrapped.
"""

import functools

import chex
import jax.numpy as jnp
import pytest
from flax import nnx

import fbq_jax.nnx
from fbq_jax import Routing, llm_int8_dot, recipes
from fbq_jax.contrib import qwix
from tests.marks import with_first_fast

RNGS = {"rngs": nnx.Rngs(0)}


def dense(op):
    return nnx.Linear(64, 8, dot_general=op, **RNGS)


def frozen():
    model = dense(fbq_jax.nnx.FallbackDot(**RNGS))
    model(jnp.ones((4, 64)))
    return fbq_jax.nnx.freeze(model, jnp.ones((4, 64)))


def quantized():
    """Layers of several kinds, each with its op."""
    einsum = nnx.Einsum("btd,dhk->bthk", (64, 2, 32), **RNGS)
    conv, linear = nnx.Conv(64, 64, (2,), **RNGS), nnx.Linear(64, 64, **RNGS)
    flat = functools.partial(jnp.reshape, shape=(2, 4, 64))
    model = nnx.Sequential(linear, nnx.relu, conv, einsum, flat)
    fbq_jax.nnx.quantize(model, {".*": recipes.block}, quantize_rngs=nnx.Rngs(2))
    return model


def int8_flow():
    mlp = fbq_jax.nnx.Int8MLP(64, 128, **RNGS)
    attention = fbq_jax.nnx.Int8Attention(64, 2, **RNGS)
    return fbq_jax.nnx.Int8Sequential([attention, mlp])


class OwnCode(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(64, 8, **RNGS)
        self.w = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return self.up(x) @ self.w[...]


def own_code():
    rules = {".*": recipes.block}
    return qwix.quantize_nnx(OwnCode(), rules, jnp.ones((2, 4, 64)))[0]


MODELS = {
    "fallback": lambda: dense(fbq_jax.nnx.FallbackDot(**RNGS)),
    "frozen": frozen,
    # Other tests call each of the others.
    "fp8": lambda: dense(fbq_jax.nnx.Fp8Dot()),
    "llm_int8": lambda: dense(llm_int8_dot),
    "norm": lambda: fbq_jax.nnx.RMSNorm(64, **RNGS),
    "quantized": quantized,
    "own code": own_code,
    "int8_flow": int8_flow,
    "experts": lambda: fbq_jax.nnx.MoEMLP(64, Routing(num_experts=4), 128, **RNGS),
}


WITHOUT_STATE = {"fp8", "llm_int8", "norm", "experts"}
# The ops with a row of their own: those that a layer calls.
SHOWN = {"fallback": 1, "frozen": 1, "quantized": 3, "own code": 2}


@pytest.mark.parametrize("name", with_first_fast(MODELS, 2))
def test_tabulate_shows_the_model_and_leaves_it_as_it_is(name):
    model, x = MODELS[name](), jnp.ones((2, 4, 64))
    state = nnx.state(model)
    shown = nnx.tabulate(model, x, console_kwargs={"width": 200})
    assert type(model).__name__ in shown
    assert ("FallbackState" in shown) == (name not in WITHOUT_STATE)
    assert shown.count("theta:") == SHOWN.get(name, 0)
    chex.assert_trees_all_equal(nnx.state(model), state)
    model(x)
