"""Smooth-SwiGLU: SwiGLU's values and gradients, a bounded output, folded weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import nonlinear, smooth_swiglu
from fbq_jax.fp8.smooth_swiglu import SmoothSwiGLU
from fbq_jax.kernels import packing
from tests.fbq_jax.core.test_nonlinear import finite_differences

FORMS = {
    "per_channel": jax.jit(smooth_swiglu.per_channel),
    "per_token": jax.jit(smooth_swiglu.per_token),
}
every_form = pytest.mark.parametrize("form", FORMS)


def normal(shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def silu(x):
    return x / (1 + np.exp(-x))


def exact_mlp(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def spiky(shape, seed=0):
    """One token and one channel are a thousand times larger than the rest."""
    x = np.array(normal(shape, seed))
    x[1] *= 1000.0
    x[:, 2] *= 1000.0
    return jnp.asarray(x)


@every_form
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_is_divided_by_the_maximum_and_bounded_by_silu(form, dtype):
    gate, up = normal((6, 40)).astype(dtype), spiky((6, 40), 1).astype(dtype)
    y, scale = FORMS[form](gate, up)
    assert y.dtype == scale.dtype == dtype
    axis = 0 if form == "per_channel" else 1
    expected = np.abs(up.astype(jnp.float32)).max(axis, keepdims=True)
    assert scale.shape == ((40,) if form == "per_channel" else (6, 1))
    np.testing.assert_array_equal(scale.astype(jnp.float32).ravel(), expected.ravel())

    gate64, up64 = (np.asarray(a.astype(jnp.float32), np.float64) for a in (gate, up))
    eps = float(jnp.finfo(dtype).eps)
    values = np.asarray(y.astype(jnp.float32), np.float64)
    exact = silu(gate64) * up64 / expected
    np.testing.assert_allclose(values, exact, rtol=4 * eps, atol=eps)
    assert np.all(np.abs(values) <= (1 + 4 * eps) * np.abs(silu(gate64)))


@pytest.mark.parametrize("form", [*FORMS, None])
def test_values_and_gradients_equal_swiglus(form, monkeypatch):
    """Compares with float64 finite differences; the gate saves floats here."""
    monkeypatch.setattr(nonlinear, "_quantize", lambda x, _: x)
    monkeypatch.setattr(packing, "dequantize", lambda x, *_: x)
    x, gate, up = normal((4, 5), 0), normal((5, 6), 1) / 2.0, normal((5, 6), 2)
    operands = (x, gate, up.at[:, 1].multiply(100.0), normal((6, 5), 3))

    def mlp(x, gate, up, down):
        kernels = {"gate": gate, "up": up, "down": down}
        params = {name: {"kernel": kernel} for name, kernel in kernels.items()}
        return SmoothSwiGLU(6, form).apply({"params": params}, x)

    y, pullback = jax.vjp(jax.jit(mlp), *operands)
    exact = exact_mlp(*(np.asarray(a, np.float64) for a in operands))
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4)
    dy = normal(y.shape, 9)
    expected = finite_differences(exact_mlp, np.asarray(dy, np.float64), operands)
    for gradient, column in zip(pullback(dy), expected, strict=True):
        size = np.abs(column).max()
        np.testing.assert_allclose(gradient, column, rtol=1e-4, atol=1e-5 * size)


@every_form
def test_the_scale_is_a_constant_in_differentiation(form):
    """Without quantization, its gradients from both of its uses would cancel."""
    gate, up = normal((6, 40)), spiky((6, 40), 1)
    (y, scale), pullback = jax.vjp(FORMS[form], gate, up)
    of_scale = pullback((jnp.zeros_like(y), jnp.ones_like(scale)))
    assert not any(map(np.any, of_scale))

    _, dup = pullback((jnp.ones_like(y), jnp.zeros_like(scale)))
    constant = scale if form == "per_token" else scale[None, :]
    np.testing.assert_allclose(dup * constant, silu(gate), atol=0.01)


def test_folded_weights_give_the_same_output():
    model, x = SmoothSwiGLU(48), normal((32, 16))
    params = jax.jit(model.init)(jax.random.key(1), x)["params"]
    apply = functools.partial(model.apply, mutable=["intermediates"])
    y, sown = jax.jit(apply)({"params": params}, x)
    (scale,) = sown["intermediates"]["scale"]
    plain = jax.jit(SmoothSwiGLU(48, smooth=None).apply)
    folded = smooth_swiglu.fold(params, scale)
    np.testing.assert_allclose(plain({"params": folded}, x), y, rtol=1e-5, atol=1e-5)
    up = x @ folded["up"]["kernel"]
    np.testing.assert_allclose(np.abs(up).max(0), np.ones(48), rtol=1e-5)

    # Powers of two change no mantissa, so the bits stay the same.
    powers = smooth_swiglu.fold(params, 2.0 ** jnp.floor(jnp.log2(scale)))
    unfolded = plain({"params": params}, x)
    np.testing.assert_array_equal(plain({"params": powers}, x), unfolded)


def test_zeros_and_empty_batches_have_a_scale_of_one():
    for form in FORMS:
        y, scale = FORMS[form](normal((6, 40)), jnp.zeros((6, 40)))
        assert not np.any(y)
        assert np.all(scale == 1.0)
    assert np.all(FORMS["per_channel"](*[jnp.ones((0, 3))] * 2)[1] == 1.0)


@pytest.mark.parametrize("form", FORMS)
def test_scales_whose_reciprocal_overflows_float16(form):
    up = jnp.full((4, 4), 1e-5, jnp.float16)
    y, scale = FORMS[form](jnp.ones_like(up), -up)
    np.testing.assert_array_equal(scale, np.broadcast_to(up[0, 0], scale.shape))
    np.testing.assert_allclose(y, np.full((4, 4), -0.731), rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_value_stays_visible_in_its_channel_or_token(bad):
    gate, up = normal((6, 40)), normal((6, 40), 1).at[1, 2].set(bad)
    for form, index in (("per_channel", 2), ("per_token", 1)):
        y, scale = FORMS[form](gate, up)
        assert np.isnan(y[1, 2])
        # The scale carries it into everything it multiplies.
        assert np.flatnonzero(~np.isfinite(scale)) == [index]


X = jnp.ones((1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SmoothSwiGLU(4, "per_row").init(jax.random.key(0), X),
            "per_channel.*per_token.*None; got 'per_row'",
        ),
        (
            lambda: smooth_swiglu.fold(KERNELS, jnp.ones((4, 1))),
            r"of 3 channels; got an array \(4, 1\)",
        ),
        (lambda: smooth_swiglu.fold(KERNELS, jnp.array([1.0, 0, 2])), "minimum 0.0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


KERNELS = {name: {"kernel": jnp.ones((3, 3))} for name in ("gate", "up", "down")}
