"""``nnx.tabulate`` of models with quantized layers.

It wraps the public functions of all modules' classes, and an error leaves them wrapped.
"""

import chex
import jax.numpy as jnp
import pytest
from flax import nnx

import fbq_jax.nnx
from fbq_jax import Routing, llm_int8_dot, recipes


def dense(op):
    return nnx.Linear(64, 8, dot_general=op, rngs=nnx.Rngs(0))


def quantized():
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
    fbq_jax.nnx.quantize(model, {".*": recipes.block}, rngs=nnx.Rngs(2))
    return model


def frozen():
    model = dense(fbq_jax.nnx.FallbackDot(rngs=nnx.Rngs(0)))
    model(jnp.ones((4, 64)))
    return fbq_jax.nnx.freeze(model, jnp.ones((4, 64)))


def int8_flow():
    mlp = fbq_jax.nnx.Int8MLP(64, 128, rngs=nnx.Rngs(0))
    attention = fbq_jax.nnx.Int8Attention(64, 2, rngs=nnx.Rngs(1))
    return fbq_jax.nnx.Int8Sequential([attention, mlp])


def experts():
    routing = Routing(num_experts=4, top_k=2)
    return fbq_jax.nnx.MoEMLP(64, routing, hidden=128, rngs=nnx.Rngs(0))


def einsum():
    op = fbq_jax.nnx.FallbackEinsum(rngs=nnx.Rngs(0))
    return nnx.Einsum("btd,dhk->bhtk", (64, 2, 4), einsum_op=op, rngs=nnx.Rngs(0))


def conv():
    op = fbq_jax.nnx.FallbackConv(rngs=nnx.Rngs(0))
    return nnx.Conv(64, 8, (2,), conv_general_dilated=op, rngs=nnx.Rngs(0))


MODELS = {
    "fallback": lambda: dense(fbq_jax.nnx.FallbackDot(rngs=nnx.Rngs(0))),
    "fp8": lambda: dense(fbq_jax.nnx.Fp8Dot()),
    "llm_int8": lambda: dense(llm_int8_dot),
    "norm": lambda: fbq_jax.nnx.RMSNorm(64, rngs=nnx.Rngs(0)),
    **{f.__name__: f for f in (quantized, frozen, int8_flow, experts, einsum, conv)},
}


# State and codes; other tests call each of the others.
FAST = {"fallback", "frozen"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.exhaustive] * (name not in FAST))
        for name, make in MODELS.items()
    ],
)
def test_tabulate_shows_the_model_and_leaves_it_as_it_is(make):
    model, x = make(), jnp.ones((2, 4, 64))
    state = nnx.state(model)
    shown = nnx.tabulate(model, x)
    assert type(model).__name__ in shown
    chex.assert_trees_all_equal(nnx.state(model), state)
    model(x)
