"""The delay threshold on random block maxima."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import Recipe
from fbq_jax.core import threshold

RECIPE = Recipe()


@functools.partial(jax.jit, static_argnames=("recipe", "steps"))
def drive(theta, key, spread, blocks, recipe=RECIPE, steps=225):
    """The rates of training forwards with log-normal block maxima."""
    state = threshold.start(recipe)
    state["theta"] = jnp.asarray(theta, jnp.float32)

    def step(state, key):
        metric = jnp.exp(spread * jax.random.normal(key, blocks.shape))
        theta = state["theta"]
        theta = jnp.where(theta < 0.0, threshold.quantile(metric, recipe), theta)
        state = threshold.update(state, metric, theta, recipe)
        return state, state["rate"]

    return jax.lax.scan(step, state, jax.random.split(key, steps))[1]


def in_range(rates):
    low, high = RECIPE.target_rate
    return (np.asarray(rates) >= low) & (np.asarray(rates) <= high)


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_threshold_1000_times_too_high_settles(spread, seed):
    """For any spread of the block maxima."""
    key, blocks = jax.random.key(seed), jnp.zeros((64, 8))
    right = threshold.quantile(
        jnp.exp(spread * jax.random.normal(key, blocks.shape)), RECIPE
    )
    rates = drive(1000 * right, key, spread, blocks)
    inside = in_range(rates)
    assert inside[:25].any()
    assert inside[25:].mean() >= 0.97


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_the_first_batch_start_is_in_range_at_once(spread):
    rates = drive(threshold.UNSET, jax.random.key(3), spread, jnp.zeros((64, 8)))
    assert in_range(rates[:3]).all()
    assert in_range(rates).mean() >= 0.97


def test_quantile_puts_the_rate_in_the_middle():
    metric = jnp.arange(1.0, 101.0).reshape(10, 10)
    theta = threshold.quantile(metric, RECIPE)
    assert theta == 80.0
    np.testing.assert_allclose(threshold.fallback_rate(metric, theta), 0.2, rtol=1e-6)
    assert threshold.quantile(jnp.ones((1, 1)), RECIPE) == 1.0


@pytest.mark.parametrize(
    "metric",
    [jnp.zeros((4, 4)), jnp.ones((4, 4)).at[0, 0].set(jnp.nan), jnp.zeros((0, 4))],
)
def test_nothing_starts_from_zeros_nan_or_no_blocks(metric):
    assert threshold.quantile(metric, RECIPE) == threshold.UNSET
    state = threshold.start(RECIPE)
    state = threshold.update(state, metric, threshold.quantile(metric, RECIPE), RECIPE)
    assert state["theta"] == threshold.UNSET
    assert state["count"] == 1


def test_a_diverged_batch_leaves_theta_where_it_was():
    state = threshold.start(Recipe(start=2.0))
    metric = jnp.full((4, 4), jnp.nan)
    state = threshold.update(state, metric, state["theta"], RECIPE)
    assert state["theta"] == 2.0
    assert state["rate"] == 0.0


def test_it_moves_by_at_most_alpha_and_only_outside_the_range():
    state = threshold.start(Recipe(start=10.0))
    quiet, loud = jnp.full((10, 10), 1.0), jnp.full((10, 10), 1e6)
    good = quiet.at[:2].set(20.0)
    for metric, theta in ((quiet, 10.0 / 1.5), (loud, 15.0), (good, 10.0)):
        new = threshold.update(state, metric, state["theta"], RECIPE)
        np.testing.assert_allclose(new["theta"], theta, rtol=1e-6)


def test_each_call_has_its_own_seed():
    state = threshold.start(RECIPE, seed=5)
    other = threshold.start(RECIPE, seed=6)
    later = threshold.update(state, jnp.ones((2, 2)), jnp.float32(1.0), RECIPE)
    seeds = {int(threshold.call_seed(s)) for s in (state, other, later)}
    assert len(seeds) == 3
