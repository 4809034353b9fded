"""The delay threshold on random block maxima."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import Recipe
from fbq_jax.core import threshold
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.threshold_reference import UNSET

RECIPE = Recipe()


def scalars(theta):
    """The scalars of a call without state."""
    return threshold.Scalars(jnp.float32(theta), jnp.uint32(0))


def stats_of(metric, theta, recipe=RECIPE):
    """The stats of blocks with these metrics."""
    residual = Quantized(None, jnp.ones_like(metric))
    return threshold.apply(scalars(theta), metric, residual, recipe)[1]


def moved(state, metric, recipe=RECIPE):
    """The state after blocks with these metrics."""
    residual = Quantized(None, jnp.ones_like(metric))
    call = threshold.scalars_of(state)
    return threshold.next_state(
        state, threshold.apply(call, metric, residual, recipe)[1]
    )


@functools.partial(jax.jit, static_argnames=("recipe", "steps"))
def drive(theta, key, spread, blocks, recipe=RECIPE, steps=225):
    """The rates of training forwards with log-normal block maxima."""
    state = threshold.start(recipe)
    state["theta"] = jnp.asarray(theta, jnp.float32)

    def step(state, key):
        metric = jnp.exp(spread * jax.random.normal(key, blocks.shape))
        state = moved(state, metric, recipe)
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
    metric = jnp.exp(spread * jax.random.normal(key, blocks.shape))
    right = stats_of(metric, UNSET).theta
    rates = drive(1000 * right, key, spread, blocks)
    inside = in_range(rates)
    assert inside[:25].any()
    assert inside[25:].mean() >= 0.97


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_the_first_batch_start_is_in_range_at_once(spread):
    rates = drive(UNSET, jax.random.key(3), spread, jnp.zeros((64, 8)))
    assert in_range(rates[:3]).all()
    assert in_range(rates).mean() >= 0.97


def test_quantile_puts_the_rate_in_the_middle():
    metric = jnp.arange(1.0, 101.0).reshape(10, 10)
    stats = stats_of(metric, UNSET)
    assert stats.theta == stats.next_theta == 80.0
    np.testing.assert_allclose(stats.rate, 0.2, rtol=1e-6)
    assert stats_of(jnp.ones((1, 1)), UNSET).theta == 1.0


@pytest.mark.parametrize(
    "metric",
    [jnp.zeros((4, 4)), jnp.ones((4, 4)).at[0, 0].set(jnp.nan), jnp.zeros((0, 4))],
)
def test_nothing_starts_from_zeros_nan_or_no_blocks(metric):
    assert stats_of(metric, UNSET).theta == UNSET
    state = moved(threshold.start(RECIPE), metric)
    assert state["theta"] == UNSET
    assert state["count"] == 1


def test_a_diverged_batch_leaves_theta_where_it_was():
    state = threshold.start(Recipe(start=2.0))
    state = moved(state, jnp.full((4, 4), jnp.nan))
    assert state["theta"] == 2.0
    assert state["rate"] == 0.0


def test_it_moves_by_at_most_alpha_and_only_outside_the_range():
    state = threshold.start(Recipe(start=10.0))
    quiet, loud = jnp.full((10, 10), 1.0), jnp.full((10, 10), 1e6)
    good = quiet.at[:2].set(20.0)
    for metric, theta in ((quiet, 10.0 / 1.5), (loud, 15.0), (good, 10.0)):
        new = moved(state, metric)
        np.testing.assert_allclose(new["theta"], theta, rtol=1e-6)


def test_each_call_has_its_own_seed():
    state = threshold.start(RECIPE, seed=5)
    other = threshold.start(RECIPE, seed=6)
    later = moved(state, jnp.ones((2, 2)))
    seeds = {int(threshold.call_seed(s)) for s in (state, other, later)}
    assert len(seeds) == 3


@pytest.mark.parametrize("theta", [0.0, np.inf])
def test_a_theta_that_no_factor_moves_starts_anew(theta):
    metric = jnp.arange(1.0, 101.0).reshape(10, 10)
    stats = stats_of(metric, theta)
    assert stats.theta == theta
    assert stats.next_theta == 80.0


@pytest.mark.parametrize("theta", [UNSET, np.nan])
def test_an_unset_theta_selects_the_residuals_above_it(theta):
    metric = jnp.arange(1.0, 101.0).reshape(10, 10)
    residual = Quantized(None, 0.5 * metric)
    selected, stats = threshold.apply(scalars(theta), metric, residual, RECIPE)
    assert stats.theta == 80.0
    expected = jnp.where(metric > 80.0, residual.scales, 0.0)
    np.testing.assert_array_equal(selected.scales, expected)
