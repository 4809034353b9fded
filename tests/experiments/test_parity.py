"""Two hundred steps of a small Llama: INT8 with fallback trains as bf16 does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.config import RECIPES, Config
from examples.llama.data import batches, load_corpus
from examples.llama.loss import cross_entropy
from examples.llama.model import Llama
from examples.llama.step import (
    EVAL_BATCHES,
    init_state,
    make_optimizer,
    make_train_step,
)

CONFIG = Config(
    hidden=128, ffn=768, layers=1, heads=2, batch=4, seq=128, steps=200, lr=1e-3
)
# Other tests compile without optimization, but here the steps take the time.
OPTIONS = {"xla_backend_optimization_level": 1}


class Planted:
    """Plants outliers in the input of the down projection; the product is unchanged.

    One channel of the input is multiplied by a factor, and its row of the weight is
    divided by it.  A factor of 1 plants nothing.
    """

    def __init__(self, dot_general, factor, channel=77):
        self.dot_general = dot_general
        self.scale = jnp.ones((CONFIG.ffn, 1)).at[channel].set(factor)

    def __call__(self, lhs, rhs, dims, precision=None, preferred_element_type=None):
        if rhs.shape[0] == CONFIG.ffn:
            lhs = lhs * self.scale.astype(lhs.dtype).reshape(1, 1, -1)
            rhs = rhs / self.scale.astype(rhs.dtype)
        return self.dot_general(lhs, rhs, dims, precision, preferred_element_type)


@functools.cache
def corpus():
    return load_corpus(None)


def build(recipe, factor=None, config=CONFIG, dtype=jnp.bfloat16):
    dot_general = RECIPES[recipe] or jax.lax.dot_general
    if factor is not None:
        dot_general = Planted(dot_general, factor)
    sizes = dataclasses.replace(config.sizes(corpus().vocab_size), dtype=dtype)
    return Llama(sizes, dot_general)


@functools.cache
def train(recipe, config=CONFIG, dtype=jnp.bfloat16):
    """Returns the losses and fallback rates of the steps, and the last parameters."""
    model = build(recipe, config=config, dtype=dtype)
    optimizer, schedule = make_optimizer(config)
    state = init_state(model, optimizer, None, seed=0)
    step = make_train_step(model, optimizer, schedule)
    data = batches(corpus(), "train", seq=config.seq, batch=config.batch, seed=0)
    losses, rates = [], []
    # JAX's attention and Optax rely on promotion.
    with jax.numpy_dtype_promotion("standard"):
        step = step.lower(state, data[0][None]).compile(compiler_options=OPTIONS)
        for i in range(config.steps):
            state, measured = step(state, data[i][None])
            losses.append(float(measured["loss"]))
            rates.append([layer["rate"] for layer in measured["fallback"].values()])
    return np.array(losses), np.array(rates), state.params


def validate(recipe):
    """Returns the validation losses of bf16's weights, without and with outliers."""

    @jax.jit
    def loss(factor, variables, tokens):
        logits = build(recipe, factor).apply(variables, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    # Outliers do not change the state, and `train` has compiled this initializer.
    state = init_state(build(recipe), make_optimizer(CONFIG)[0], None, seed=0)
    variables = dataclasses.replace(state, params=train("bf16")[2]).variables()
    data = batches(corpus(), "val", seq=CONFIG.seq, batch=CONFIG.batch, seed=0)
    factors = jnp.float32(1.0), jnp.float32(300.0)
    loss = loss.lower(factors[0], variables, data[0]).compile(compiler_options=OPTIONS)
    return [
        np.mean([loss(factor, variables, data[i]) for i in range(EVAL_BATCHES)])
        for factor in factors
    ]


@pytest.mark.exhaustive
def test_two_hundred_steps_end_where_bf16_ends():
    bf16, *_ = train("bf16")
    fallback, rates, _ = train("fallback")
    assert bf16[-20:].mean() < 0.45 * bf16[0]
    assert fallback[0] == pytest.approx(bf16[0], rel=1e-3)
    assert fallback[-20:].mean() == pytest.approx(bf16[-20:].mean(), rel=0.01)
    assert 0.05 < rates[-20:].mean() < 0.35


@pytest.mark.exhaustive
def test_outliers_harm_block_and_not_fallback():
    """The model is trained, so quantization alone changes its loss."""
    losses = {recipe: validate(recipe) for recipe in ("bf16", "block", "fallback")}
    harm = {recipe: planted - plain for recipe, (plain, planted) in losses.items()}
    assert harm["block"] > 5e-4 * losses["bf16"][0]
    assert abs(harm["bf16"]) < 0.1 * harm["block"]
    assert abs(harm["fallback"]) < 0.25 * harm["block"]


@pytest.mark.exhaustive
def test_int8_with_fallback_trains_experts_as_floats_do():
    # With larger steps, float32 and bf16 drift apart by 1 % themselves.
    sizes = {"experts": 4, "ffn": 256, "layers": 2, "kv_heads": 1}
    config = dataclasses.replace(CONFIG, **sizes, batch=8, steps=60, lr=5e-4)
    int8 = train("fallback", config)[0][-20:].mean()
    for dtype in jnp.float32, jnp.bfloat16:
        loss = train("bf16", config, dtype)[0][-20:].mean()
        assert loss < np.log(256) - 1
        assert abs(int8 / loss - 1) < 0.01
