"""The delay threshold on random block maxima."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import Recipe
from fbq_jax.core import threshold
from fbq_jax.kernels.quantized import UNSET
from tests.marks import with_first_fast

RECIPE = Recipe()


def scalars(theta):
    """The scalars of a call without state."""
    return threshold.Scalars(jnp.float32(theta), jnp.uint32(0))


def stats_of(metric, theta):
    """The stats of blocks with these metrics."""
    ones = jnp.ones_like(metric)
    return threshold.apply(scalars(theta), metric, ones, RECIPE)[1]


def moved(state, metric):
    """The state after blocks with these metrics."""
    call, ones = threshold.scalars_of(state), jnp.ones_like(metric)
    stats = threshold.apply(call, metric, ones, RECIPE)[1]
    return threshold.next_state(state, stats)


def in_range(rates):
    low, high = RECIPE.target_rate
    return (np.asarray(rates) >= low) & (np.asarray(rates) <= high)


@pytest.mark.parametrize("spread", with_first_fast([0.05, 0.2, 0.5, 1.0, 2.0], 2))
@pytest.mark.parametrize("seed", with_first_fast([0, 1, 2]))
@pytest.mark.parametrize("factor", [None, 1000.0])
def test_a_first_threshold_is_right_and_one_that_is_too_high_settles(
    spread, seed, factor
):
    """For any spread of the block maxima, which are log-normal."""
    rng = np.random.default_rng(seed)
    metrics = np.exp(spread * rng.normal(size=(225, 64, 8)))
    right = stats_of(jnp.asarray(metrics[0], jnp.float32), UNSET).theta
    rates, _ = rates_of(metrics, UNSET if factor is None else factor * right)
    inside = in_range(rates)
    if factor is None:
        assert inside[:3].all()
    assert inside[:25].any()
    assert inside[25:].mean() >= 0.97


@pytest.mark.parametrize("theta", [0.0, np.inf, UNSET])
def test_quantile_puts_the_rate_in_the_middle(theta):
    """Also where no factor moves a threshold; and there is a rate without blocks."""
    assert stats_of(jnp.zeros((2, 2)), theta).rate == 0.0
    stats = stats_of(jnp.arange(1.0, 101.0).reshape(10, 10), theta)
    assert stats.next_theta == 80.0
    if theta != UNSET:
        assert stats.theta == theta
        return
    assert stats.theta == 80.0
    np.testing.assert_allclose(stats.rate, 0.2, rtol=1e-6)
    assert stats_of(jnp.ones((1, 1)), UNSET).theta == 1.0


@pytest.mark.parametrize(
    "metric",
    [jnp.zeros((4, 4)), jnp.ones((4, 4)).at[0, 0].set(jnp.nan), jnp.zeros((0, 4))],
)
def test_nothing_starts_from_zeros_nan_or_no_blocks(metric):
    assert stats_of(metric, UNSET).theta == UNSET
    state = moved(threshold.start(RECIPE), metric)
    assert (state["theta"], state["count"]) == (UNSET, 1)


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


@pytest.mark.parametrize("theta", [UNSET, np.nan])
def test_an_unset_theta_selects_the_residuals_above_it(theta):
    metric = jnp.arange(1.0, 101.0).reshape(10, 10)
    scales = 0.5 * metric
    selected, stats = threshold.apply(scalars(theta), metric, scales, RECIPE)
    assert stats.theta == 80.0
    np.testing.assert_array_equal(selected, jnp.where(metric > 80.0, scales, 0.0))


def steps_to(ratio):
    """The number of moves that change a threshold by this factor."""
    return math.ceil(abs(math.log(ratio)) / math.log(RECIPE.alpha))


@jax.jit
def rates_of(metrics, theta=UNSET):
    """The rates and thresholds of training forwards with these metrics."""
    state = threshold.start(RECIPE) | {"theta": jnp.asarray(theta, jnp.float32)}

    def step(state, metric):
        state = moved(state, metric)
        return state, (state["rate"], state["theta"])

    return jax.lax.scan(step, state, metrics)[1]


def sparse_metrics(rng, steps, density):
    """Block maxima of which a share of ``density`` is not zero, at least one."""
    metrics = np.exp(0.5 * rng.normal(size=(steps, 200)))
    metrics[rng.random(metrics.shape) > density] = 0.0
    metrics[:, 0] = 1.0
    return metrics


@pytest.mark.parametrize("density", with_first_fast([0.9, 0.5, 0.15, 0.02], 2))
@pytest.mark.parametrize("factor", [1e-6, 0.1, 10.0, 1e6])
def test_zero_blocks_do_not_keep_a_threshold_where_it_is(density, factor):
    """Padding, or empty slots of experts."""
    metrics = sparse_metrics(np.random.default_rng(0), 120, density)
    exact = stats_of(jnp.asarray(metrics[0], jnp.float32), UNSET).theta
    rates, thetas = rates_of(metrics, factor * exact)
    recovered = steps_to(factor) + 5
    assert 0.5 < thetas[recovered] / exact < 2.0
    assert 0.05 < rates[recovered:].mean() < 0.4


@pytest.mark.parametrize("zeros", with_first_fast([1, 37, 100, 10_000], 2))
@pytest.mark.parametrize("theta", [UNSET, 1e-3, 1.0, 1e3])
def test_padding_changes_nothing(zeros, theta):
    rng = np.random.default_rng(1)
    metric = jnp.asarray(np.exp(rng.normal(size=100)), jnp.float32)
    want = stats_of(metric, theta)
    got = stats_of(jnp.pad(metric, (0, zeros)), theta)
    np.testing.assert_array_equal(got.rate, want.rate)
    np.testing.assert_array_equal(got.theta, want.theta)
    np.testing.assert_array_equal(got.next_theta, want.next_theta)


@pytest.mark.parametrize("jump", [1e-6, 1e6, 1e-30, 1e30])
def test_it_follows_a_jump_of_the_activations(jump):
    """Between batches of zeros, too."""
    metrics = np.exp(np.random.default_rng(2).normal(size=(300, 256)))
    metrics[20:] *= jump
    metrics[30:250:10] = 0.0
    rates, thetas = rates_of(metrics)
    assert np.isfinite(thetas).all()
    inside = in_range(rates)
    assert inside[:20].all()
    assert not inside[20 : 20 + steps_to(jump) // 2].any()
    assert inside[-30:].mean() >= 0.97


@pytest.mark.parametrize("theta", [UNSET, 1e-6, 1e6])
@pytest.mark.parametrize("blocks", with_first_fast([1, 2, 7]))
def test_few_or_equal_blocks_bring_the_threshold_to_their_metric(theta, blocks):
    """No threshold gives a rate in the range; 0 is the nearest."""
    rates, thetas = rates_of(np.full((60, blocks), 3.0), theta)
    assert (thetas[steps_to(1e6) + 2 :] == 3.0).all()
    assert (rates[steps_to(1e6) + 2 :] == 0.0).all()


@pytest.mark.parametrize("theta", [UNSET, 1e-3, 1e3])
@pytest.mark.parametrize(("share", "want"), [(0.25, 0.25), (0.9, 0.0)])
def test_a_maximum_that_many_blocks_share(theta, share, want):
    """Saturated activations, whose blocks' maxima are equal."""
    metric = np.where(np.arange(100) < 100 * share, 6.0, np.linspace(1.0, 2.0, 100))
    rates, _ = rates_of(np.tile(metric, (40, 1)), theta)
    settled = rates[steps_to(6e3) + 2 :]
    np.testing.assert_allclose(settled, want, rtol=1e-6)
