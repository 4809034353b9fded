"""Two hundred steps of the Llama: INT8 with fallback trains as bf16 does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.config import RECIPES, Config
from examples.llama.data import batches, load_corpus
from examples.llama.model import Llama, LlamaConfig
from examples.llama.step import init_state, make_optimizer, make_train_step
from fbq_jax import FallbackDot

CONFIG = Config(
    hidden=128, ffn=768, layers=2, heads=2, batch=4, seq=128, steps=200, lr=1e-3
)


class Planted:
    """Plants outliers in the down projection's input without changing the product.

    One channel of the SwiGLU's output is scaled by 300, and its row of the weight
    divided by as much.
    """

    def __init__(self, dot_general, channel=77, factor=300.0):
        self.dot_general = dot_general
        self.scale = jnp.ones(CONFIG.ffn).at[channel].set(factor)

    def __call__(self, lhs, rhs, dims, precision=None, preferred_element_type=None):
        if rhs.shape[0] == CONFIG.ffn:
            lhs = lhs * self.scale.astype(lhs.dtype)
            rhs = rhs / self.scale[:, None].astype(rhs.dtype)
        return self.dot_general(lhs, rhs, dims, precision, preferred_element_type)


@functools.cache
def corpus():
    return load_corpus(None)


def build(recipe, planted):
    recipe = RECIPES[recipe]
    dot_general = jax.lax.dot_general if recipe is None else FallbackDot(recipe)
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
def train(recipe, steps, planted=False, first_params=None):
    """The losses of a run, and its last state; from new weights or a run's last."""
    model = build(recipe, planted)
    optimizer, schedule = make_optimizer(CONFIG)
    params = train(*first_params)[1].params if first_params else None
    state = init_state(model, optimizer, params, seed=0)
    step = make_train_step(model, optimizer, schedule)
    order = 0 if first_params is None else 1
    data = batches(corpus(), "train", seq=CONFIG.seq, batch=CONFIG.batch, seed=order)
    losses = []
    # JAX's attention and Optax promote dtypes themselves.
    with jax.numpy_dtype_promotion("standard"):
        for i in range(steps):
            state, measured = step(state, data[i][None])
            losses.append(float(measured["loss"]))
    return np.array(losses), state


def test_two_hundred_steps_end_where_bf16_ends():
    bf16, _ = train("bf16", 200)
    fallback, state = train("fallback", 200)
    assert bf16[-20:].mean() < 0.45 * bf16[0]
    assert fallback[0] == pytest.approx(bf16[0], rel=1e-3)
    assert fallback[-20:].mean() == pytest.approx(bf16[-20:].mean(), rel=0.01)
    rates = [stats.rate.mean() for stats in state.stats().values()]
    assert 0.05 < np.mean(rates) < 0.35


def test_outliers_harm_block_and_not_fallback():
    """The trained model goes on with outliers planted, 60 steps by each recipe."""
    first = ("bf16", 200)
    bf16, block, fallback = (
        train(recipe, 60, planted=True, first_params=first)[0].mean()
        for recipe in ("bf16", "block", "fallback")
    )
    assert block - bf16 > 1e-3 * bf16
    assert abs(fallback - bf16) < 0.5e-3 * bf16
