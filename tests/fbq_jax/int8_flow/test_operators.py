"""INT8 operators against their equations in float64, and on special blocks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.int8_flow import operators
from fbq_jax.int8_flow.operators import (
    Dropout,
    Gelu,
    LayerNorm,
    Linear,
    add,
    add_grads,
)
from fbq_jax.int8_flow.self_attention import SelfAttention
from tests import oracle
from tests.kernels.quantize_cases import heavy

M, K, N, SIDE = 80, 96, 64, 32
BLOCK = (SIDE, SIDE)
SEED = jnp.uint32(7)
RATE, MASK_STREAM, CORE_STREAM = 0.25, 1, 1

rng = np.random.default_rng(0)
KERNEL = rng.standard_normal((K, N), np.float32)
BIAS = rng.standard_normal(N, np.float32)
SCALE, SHIFT = rng.standard_normal((2, K), np.float32)


def values(q):
    """The dequantized values in float64."""
    return oracle.dequantize(np.asarray(q.main.codes[0]), q.main.scales[0], q.block)


def linear(x, dy, side):
    w = oracle.quantize(KERNEL, (side, side))[2]
    grads = {"kernel": x.T @ dy, "bias": dy.sum(0)}
    return x @ w + BIAS, dy @ w.T, grads


def gelu(x, dy, _):
    u, du = x + 0.044715 * x**3, 1 + 3 * 0.044715 * x**2
    t, c = np.tanh(math.sqrt(2 / math.pi) * u), math.sqrt(2 / math.pi)
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * c * du
    return 0.5 * x * (1 + t), dy * slope, {}


def layer_norm(x, dy, _):
    rstd = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    normalized = (x - x.mean(1, keepdims=True)) * rstd
    h = dy * SCALE
    projection = normalized * (h * normalized).mean(1, keepdims=True)
    dx = rstd * (h - h.mean(1, keepdims=True) - projection)
    grads = {"scale": (dy * normalized).sum(0), "bias": dy.sum(0)}
    return normalized * SCALE + SHIFT, dx, grads


def dropout(x, dy, _):
    seed = oracle.fold(int(SEED), MASK_STREAM)
    factor = (oracle.noise(int(seed), x.shape) < 0.5 - RATE) / (1 - RATE)
    return x * factor, dy * factor, {}


CASES = {
    "linear": (Linear(), {"kernel": KERNEL, "bias": BIAS}, linear, N),
    "gelu": (Gelu(), {}, gelu, K),
    "layer_norm": (LayerNorm(), {"scale": SCALE, "bias": SHIFT}, layer_norm, K),
    "dropout": (Dropout(RATE), {}, dropout, K),
}
to_codes = jax.jit(operators.to_codes, static_argnums=1)
every_operator = pytest.mark.parametrize("name", CASES)


def assert_codes(q, exact, noise=None):
    """Codes differ from those of exact values by at most 1, and rarely."""
    codes, scales, _ = oracle.quantize(exact, q.block, noise)
    np.testing.assert_allclose(q.main.scales[0], scales, rtol=1e-5)
    apart = np.abs(np.asarray(q.main.codes[0], np.int32) - codes)
    assert apart.max() <= 1
    assert apart.mean() < 1e-3


@pytest.mark.parametrize(
    ("name", "side"), [*((name, SIDE) for name in CASES), ("linear", 128)]
)
def test_forward_and_backward_match_the_equations(name, side):
    operator, params, equations, width = CASES[name]
    x = to_codes(heavy((1, M, K)), side)
    dy = to_codes(heavy((1, M, width), seed=1), side)
    exact_y, exact_dx, exact_grads = equations(values(x), values(dy), side)

    y, saved = operator.forward(params, x, SEED)
    assert_codes(y, exact_y)
    dx, grads = operator.backward(saved, dy, SEED)
    assert_codes(dx, exact_dx, oracle.noise(int(SEED), exact_dx.shape))
    assert grads.keys() == exact_grads.keys()
    for key, exact in exact_grads.items():
        assert grads[key].dtype == jnp.float32
        assert oracle.relative(grads[key], exact) < 1e-5


def attention(x, dy, heads, length, weights):
    """The equations of ``SelfAttention``, with its two inner quantizations."""
    (w_qkv, b_qkv), (w_out, b_out) = weights
    width = x.shape[1]

    def of_heads(a):
        return a.reshape(-1, length, heads, width // heads).swapaxes(1, 2)

    def as_matrix(a):
        return a.swapaxes(1, 2).reshape(x.shape)

    q, k, v = map(of_heads, np.split(x @ w_qkv + b_qkv, 3, axis=1))
    scale = 1 / math.sqrt(width // heads)
    logits = q @ k.mT * scale
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    attended = oracle.quantize(as_matrix(p @ v), BLOCK)[2]

    do = of_heads(dy @ w_out.T)
    dp = do @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    parts = [as_matrix(a) for a in (ds @ k, ds.mT @ q, p.mT @ do)]
    core_seed = int(oracle.fold(int(SEED), CORE_STREAM))
    dqkv = np.concatenate(parts, axis=1)
    dqkv = oracle.quantize(dqkv, BLOCK, oracle.noise(core_seed, dqkv.shape))[2]
    grads = {
        "qkv": {"kernel": x.T @ dqkv, "bias": dqkv.sum(0)},
        "out": {"kernel": attended.T @ dy, "bias": dy.sum(0)},
    }
    return attended @ w_out + b_out, dqkv @ w_qkv.T, grads


def test_attention_matches_its_equations():
    width, heads, length = 32, 2, 16
    x, dy = (to_codes(heavy((1, 64, width), seed=i) / 2.0, SIDE) for i in range(2))
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    params = {
        name: {"kernel": draw((width, n)) / 8, "bias": draw(n)}
        for name, n in (("qkv", 3 * width), ("out", width))
    }
    weights = [
        (oracle.quantize(params[name]["kernel"], BLOCK)[2], params[name]["bias"])
        for name in ("qkv", "out")
    ]
    exact = attention(values(x), values(dy), heads, length, weights)

    operator = SelfAttention(heads, length, dtype=jnp.float32)
    y, saved = operator.forward(params, x, SEED)
    dx, grads = operator.backward(saved, dy, SEED)
    noise = oracle.noise(int(SEED), exact[1].shape)
    # A value between two codes may round to the other one, inside or at the end.
    assert oracle.relative(values(y), oracle.quantize(exact[0], BLOCK)[2]) < 2e-3
    assert (
        oracle.relative(values(dx), oracle.quantize(exact[1], BLOCK, noise)[2]) < 2e-3
    )
    for name, of_it in exact[2].items():
        for key, grad in of_it.items():
            assert oracle.relative(grads[name][key], grad) < 1e-3


def test_sums_are_rounded():
    a, b = (to_codes(heavy((1, M, K), seed=i), SIDE) for i in range(2))
    exact = values(a) + values(b)
    assert_codes(add(a, b), exact)
    assert_codes(add_grads(a, b, SEED), exact, oracle.noise(int(SEED), exact.shape))


def spoiled(seed, width, bad):
    """An array with one block of zeros and one block with a bad value."""
    x = np.array(heavy((1, M, width), seed))
    x[0, :SIDE, :SIDE] = 0.0
    x[0, SIDE + 3, SIDE + 5] = bad
    return to_codes(jnp.asarray(x), SIDE)


@every_operator
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_values_stay_visible_and_zero_blocks_are_harmless(name, bad):
    operator, params, _, width = CASES[name]
    x, dy = (to_codes(heavy((1, M, size)), SIDE) for size in (K, width))
    bad_y, saved = operator.forward(params, spoiled(0, K, bad), SEED)
    good_y, good_saved = operator.forward(params, x, SEED)
    whole_row = name in ("linear", "layer_norm")
    block = np.zeros((M, K), bool)
    block[SIDE : 2 * SIDE, slice(None) if whole_row else slice(SIDE, 2 * SIDE)] = True

    assert np.all(np.isfinite(good_y.dequantize()))
    nans = np.isnan(bad_y.dequantize()[0])
    np.testing.assert_array_equal(nans, block[:, : nans.shape[1]])

    bad_dx, grads = operator.backward(good_saved, spoiled(1, width, bad), SEED)
    np.testing.assert_array_equal(np.isnan(bad_dx.dequantize()[0]), block)
    for grad in grads.values():
        columns = np.zeros(grad.shape, bool)
        columns[..., SIDE : 2 * SIDE] = True
        np.testing.assert_array_equal(np.isnan(grad), columns)
    # Bad values that the forward pass saved also reach the gradients.
    dx, grads = operator.backward(saved, dy, SEED)
    spoils = {"gelu": block, "layer_norm": block}.get(name, np.zeros_like(block))
    np.testing.assert_array_equal(np.isnan(dx.dequantize()[0]), spoils)
    if name == "linear":
        columns = np.zeros((K, N), bool)
        columns[SIDE : 2 * SIDE] = True
        np.testing.assert_array_equal(np.isnan(grads["kernel"]), columns)


@every_operator
def test_zeros_give_no_nan(name):
    operator, params, _, width = CASES[name]
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    y, saved = operator.forward(params, to_codes(zeros((1, M, K)), SIDE), SEED)
    expected = {"linear": BIAS, "layer_norm": SHIFT}.get(name, np.zeros(K))
    step = np.abs(expected).max() / 127
    np.testing.assert_allclose(
        y.dequantize()[0], np.broadcast_to(expected, (M, len(expected))), atol=step
    )
    dx, grads = operator.backward(saved, to_codes(zeros((1, M, width)), SIDE), SEED)
    assert not np.any(dx.dequantize())
    assert not any(np.any(grad) for grad in grads.values())
