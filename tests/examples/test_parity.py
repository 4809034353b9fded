"""Two hundred steps of a small Llama: INT8 with fallback trains as bf16 does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.config import RECIPES, Config
from examples.llama.data import batches, load_corpus
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.step import init_state, make_eval, make_optimizer, make_train_step

CONFIG = Config(
    hidden=128, ffn=768, layers=2, heads=2, batch=4, seq=128, steps=200, lr=1e-3
)


class Planted:
    """Plants outliers in the input of the down projection; the product is unchanged.

    One channel of the input is multiplied by 300, and its row of the weight is divided
    by 300.
    """

    def __init__(self, dot_general, channel=77, factor=300.0):
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


def build(recipe, planted):
    dot_general = RECIPES[recipe] or jax.lax.dot_general
    sizes = LlamaConfig(
        vocab_size=corpus().vocab_size,
        hidden_size=CONFIG.hidden,
        intermediate_size=CONFIG.ffn,
        num_layers=CONFIG.layers,
        num_heads=CONFIG.heads,
        num_kv_heads=CONFIG.heads,
    )
    return Llama(sizes, Planted(dot_general) if planted else dot_general)


@functools.cache
def train(recipe, steps):
    """Returns the losses of a run and its last state."""
    model = build(recipe, planted=False)
    optimizer, schedule = make_optimizer(CONFIG)
    state = init_state(model, optimizer, None, seed=0)
    step = make_train_step(model, optimizer, schedule)
    data = batches(corpus(), "train", seq=CONFIG.seq, batch=CONFIG.batch, seed=0)
    losses = []
    # JAX's attention and Optax rely on promotion.
    with jax.numpy_dtype_promotion("standard"):
        # Other tests compile without optimization, but here the steps take the time.
        options = {"xla_backend_optimization_level": 3}
        step = step.lower(state, data[0][None]).compile(compiler_options=options)
        for i in range(steps):
            state, measured = step(state, data[i][None])
            losses.append(float(measured["loss"]))
    return np.array(losses), state


@functools.cache
def validate(recipe, planted):
    """Returns the validation loss of the weights that bf16 trained."""
    # Outliers do not change the state, and `train` has compiled this initializer.
    unplanted = build(recipe, planted=False)
    state = init_state(unplanted, make_optimizer(CONFIG)[0], None, seed=0)
    state = dataclasses.replace(state, params=train("bf16", 200)[1].params)
    model = build(recipe, planted)
    data = batches(corpus(), "val", seq=CONFIG.seq, batch=CONFIG.batch, seed=0)
    return make_eval(model, data)(state)


def test_two_hundred_steps_end_where_bf16_ends():
    bf16, _ = train("bf16", 200)
    fallback, state = train("fallback", 200)
    assert bf16[-20:].mean() < 0.45 * bf16[0]
    assert fallback[0] == pytest.approx(bf16[0], rel=1e-3)
    assert fallback[-20:].mean() == pytest.approx(bf16[-20:].mean(), rel=0.01)
    rates = [stats.rate.mean() for stats in state.stats().values()]
    assert 0.05 < np.mean(rates) < 0.35


def test_outliers_harm_block_and_not_fallback():
    """The model is trained, so quantization alone changes its loss."""
    harm = {
        recipe: validate(recipe, planted=True) - validate(recipe, planted=False)
        for recipe in ("bf16", "block", "fallback")
    }
    assert harm["block"] > 5e-4 * validate("bf16", planted=False)
    assert abs(harm["bf16"]) < 0.1 * harm["block"]
    assert abs(harm["fallback"]) < 0.25 * harm["block"]
