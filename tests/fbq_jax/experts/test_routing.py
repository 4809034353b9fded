"""Routing against a plain NumPy implementation in float64."""

import fractions
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from fbq_jax import Routing
from fbq_jax.experts.plan import dispatch
from fbq_jax.experts.routing import next_bias, route, router_logits

T, E = 50, 6
LOGITS = 2.0 * np.random.default_rng(0).normal(size=(T, E)).astype(np.float32)
BIAS = np.array([0.5, 0.0, -0.5, 0.0, 0.2, 0.0], np.float32)


def expected(routing, logits, bias):
    """Experts, weights, load and both losses, token by token."""
    logits = logits.astype(np.float64)
    exp = np.exp(logits)
    scores = exp / exp.sum(1, keepdims=True)
    if routing.scores == "sigmoid":
        scores = 1.0 / (1.0 + 1.0 / exp)
    experts, weights = [], []
    for token in scores:
        chosen = np.argsort(-(token + bias), kind="stable")[: routing.top_k]
        weight = token[chosen]
        experts.append(chosen)
        weights.append(weight / weight.sum() if routing.renormalize else weight)
    load = np.bincount(np.ravel(experts), minlength=E)
    mean = (scores / scores.sum(1, keepdims=True)).mean(0)
    balance = E * np.sum(load / (len(logits) * routing.top_k) * mean)
    return experts, weights, load, balance, np.mean(np.log(exp.sum(1)) ** 2)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_routes_against_numpy(scores, renormalize, bias):
    routing = Routing(E, top_k=3, scores=scores, renormalize=renormalize)
    bias = None if bias is None else jnp.array(bias)
    got = route(routing, jnp.array(LOGITS), bias)
    want = expected(routing, LOGITS, 0.0 if bias is None else BIAS)
    np.testing.assert_array_equal(got.experts, want[0])
    np.testing.assert_array_equal(got.load, want[2])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_bias_moves_towards_the_mean_load():
    routing = Routing(5, bias_update_rate=0.25)
    moved = next_bias(routing, jnp.ones(5), jnp.array([30, 17, 24, 24, 25]))
    np.testing.assert_array_equal(moved, [0.75, 1.25, 1.0, 1.0, 0.75])


@pytest.mark.parametrize(
    ("options", "logits", "bias", "expected"),
    [
        # The others' share of the first choice is 1 / (1 + e^0.5).
        ({"scores": "sigmoid"}, [-80.0, -81.0, -82.0, -79.5], None, [-1, 0, 0, 1]),
        ({"bias_update_rate": 0.1}, [60.0, 0, 0.5, -1], [-2.0, 0, 0, 0], [0, -1, 1, 0]),
    ],
)
def test_gradients_of_very_small_scores(options, logits, bias, expected):
    routing = Routing(4, top_k=2, **options)
    bias = None if bias is None else jnp.array(bias)

    def loss(logits):
        routes = route(routing, logits[None], bias)
        return routes.weights[0, 0] + 0.0 * routes.load_balance_loss

    share = 1.0 / (1.0 + np.exp(0.5))
    slope = share * (1.0 - share)
    gradient = jax.jit(jax.grad(loss))(jnp.array(logits))
    np.testing.assert_allclose(gradient, slope * np.array(expected), atol=1e-6)


def test_no_tokens():
    routes = route(Routing(E), jnp.zeros((0, E)))
    assert routes.weights.shape == (0, 2)
    assert (routes.load_balance_loss, routes.z_loss) == (0.0, 0.0)


def test_logits_are_exact_float32():
    x, kernel = jnp.full((1, 3), 1.001, jnp.float32), jnp.ones((3, 2), jnp.bfloat16)
    with jax.default_matmul_precision("bfloat16"):
        logits = router_logits(x, kernel)
        text = jax.jit(router_logits).lower(x, kernel).as_text()
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, 3.003, rtol=1e-6)
    assert "precision = [HIGHEST, HIGHEST]" in text


@pytest.mark.parametrize("capacity", [None, 0, 3, 1000])
def test_rows_are_sorted_by_expert(capacity):
    experts = np.array(expected(Routing(E, top_k=2), LOGITS, 0.0)[0])
    plan = dispatch(jnp.array(experts, jnp.int32), E, capacity)
    queues = [[] for _ in range(E)]  # of (token, slot)
    late = []
    for token, chosen in enumerate(experts):
        for slot, expert in enumerate(chosen):
            is_full = capacity is not None and len(queues[expert]) >= capacity
            (late if is_full else queues[expert]).append(2 * token + slot)
    np.testing.assert_array_equal(plan.order, [*itertools.chain(*queues), *late])
    np.testing.assert_array_equal(plan.group_sizes, [len(queue) for queue in queues])
    np.testing.assert_array_equal(plan.order[plan.positions.ravel()], np.arange(2 * T))
    assert plan.dropped == len(late)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts": 0}, ValueError, "num_experts takes 1 to 2147483647; got 0"),
        ({"top_k": 0}, ValueError, "top_k takes 1 to num_experts=8; got 0"),
        ({"scores": "tanh"}, ValueError, r"takes one of \('softmax', 'sigmoid'\); got"),
        ({"top_k": 1}, ValueError, "with top_k=1 takes renormalize=False"),
        ({"bias_update_rate": 0.0}, ValueError, "_rate takes a positive .* got 0.0"),
        ({"capacity_factor": -1.0}, ValueError, "factor takes a positive .* got -1.0"),
        ({"capacity_factor": float("nan")}, ValueError, "_factor takes .* got nan"),
        ({"num_experts": 2**31}, ValueError, "1 to 2147483647; got 2147483648"),
        ({"bias_update_rate": 1e-50}, ValueError, "that float32 can .* got 1e-50"),
        ({"bias_update_rate": 10**400}, ValueError, "that float32 can .* got 1000"),
        ({"capacity_factor": True}, TypeError, "factor takes a positive .* got True"),
        ({"num_experts": 2.0}, TypeError, "num_experts takes an integer; got 2.0"),
        ({"top_k": 2.0}, TypeError, "Routing.top_k takes an integer; got 2.0"),
        ({"bias_update_rate": "1"}, TypeError, "update_rate takes .* or None; got '1'"),
        ({"capacity_factor": "1"}, TypeError, "_factor takes .* or None; got '1'"),
    ],
)
def test_bad_settings_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Routing(**{"num_experts": 8, **options})


def test_capacity():
    assert Routing(8).capacity(100) is None
    assert Routing(8, capacity_factor=1.25).capacity(100) == 32  # of 31.25
    assert Routing(4, capacity_factor=1.1).capacity(100) == 55  # not 55.000...01
    assert Routing(4, capacity_factor=fractions.Fraction(1, 3)).capacity(9) == 2
    numpy = Routing(np.int64(4), np.int32(2), capacity_factor=1 / 3)
    assert numpy.capacity(9) == 2


@pytest.mark.parametrize("factor", [4.0, 1e9, 1e300, 10**400])
def test_a_capacity_above_the_tokens_drops_none(factor):
    assert Routing(8, capacity_factor=factor).capacity(100) == 100


def test_a_capacity_of_symbolic_tokens_stays_in_int32():
    (tokens,) = export.symbolic_shape("t")
    assert Routing(8, capacity_factor=1e9).capacity(tokens) == tokens
    third = Routing(8, capacity_factor=fractions.Fraction(1, 3)).capacity(tokens)
    assert third == -(-tokens // 12)
    with pytest.raises(ValueError, match=r"capacity_factor takes .* small .* got 0.33"):
        Routing(8, capacity_factor=1 / 3).capacity(tokens)
