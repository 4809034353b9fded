"""LLM.int8(): both parts of each product in float64, and its unquantized part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import LlmInt8Dot, llm_int8_dot
from tests import oracle
from tests.marks import rows_with_first_fast
from tests.oracle import relative

CONTRACT = (((2,), (1,)), ((0,), (0,)))
SHAPE = (2, 20, 40, 24)  # batch, M, K, N


def operands(dtype=jnp.float32, outliers=(3, 17)):
    """An activation with outlier columns, a weight and a gradient."""
    b, m, k, n = SHAPE
    rng = np.random.default_rng(0)
    x = np.clip(rng.standard_normal((b, m, k)), -3.0, 3.0)
    for column in outliers:
        x[0, column % 5, column] = 30.0
    w, dy = rng.standard_normal((b, k, n)) / 5.0, rng.standard_normal((b, m, n))
    return [jnp.asarray(a, dtype) for a in (x, w, dy)]


@functools.partial(jax.jit, static_argnames="dot")
def product(x, w, dy, dot=llm_int8_dot):
    y, pullback = jax.vjp(lambda x, w: dot(x, w, CONTRACT), x, w)
    return y, *pullback(dy)


def by_rows(x):
    return oracle.quantize(x, (1, x.shape[1]))[2]


def by_columns(x):
    return oracle.quantize(x, (x.shape[0], 1))[2]


def exact(x, w, dy, threshold):
    """The equations for one matrix, with loops over columns."""
    x, w, dy = (np.asarray(a.astype(jnp.float32)) for a in (x, w, dy))
    outliers, rest = np.zeros_like(x), x.copy()
    for column in range(x.shape[1]):
        if np.abs(x[:, column]).max() >= threshold:
            outliers[:, column], rest[:, column] = x[:, column], 0.0
    x_o, w64, dy64 = (np.asarray(a, np.float64) for a in (outliers, w, dy))
    y = x_o @ w64 + by_rows(rest) @ by_columns(w)
    dx = dy64 @ by_columns(w).T
    dw = x_o.T @ dy64 + by_columns(rest).T @ by_columns(dy)
    return y, dx, dw


@pytest.mark.parametrize(
    ("dtype", "threshold", "tolerance"),
    rows_with_first_fast(
        [
            (jnp.float32, 6.0, 1e-5),
            (jnp.bfloat16, 6.0, 2**-8),
            (jnp.float32, np.inf, 1e-5),
        ]
    ),
)
def test_equations_in_float64(dtype, threshold, tolerance):
    """The first matrix of the batch has two outlier columns, the second has none."""
    arguments = operands(dtype)
    results = product(*arguments, LlmInt8Dot(threshold))
    for i in range(SHAPE[0]):
        expected = exact(*(a[i] for a in arguments), threshold)
        for got, value in zip(results, expected, strict=True):
            assert got.dtype == dtype
            assert relative(got[i].astype(jnp.float32), value) <= tolerance


@pytest.mark.parametrize("size", [1e-8, 1e5])
def test_gradients_outside_the_range_of_the_activation(size):
    """Those of a float32 output are not rounded to the float16 of X."""
    x, w, dy = operands()
    *_, want = product(x, w, dy * size)
    with jax.numpy_dtype_promotion("standard"):
        *_, got = product(x.astype(jnp.float16), w, dy * size)
    assert relative(got, want) < 0.01


def test_a_magnitude_at_the_threshold_is_an_outlier():
    x, w, dy = operands(outliers=())
    for value, is_float in ((-6.0, True), (-5.999999, False)):
        x = x.at[:, 0, 5].set(value)
        _, _, dw = product(x, w, dy)
        expected = np.asarray(x[0, :, 5], np.float64) @ np.asarray(dy[0], np.float64)
        assert (relative(dw[0, 5], expected) <= 1e-6) == is_float


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_stay_visible(bad):
    x, w, dy = operands()
    y, _, dw = product(x.at[0, 4, 9].set(bad), w, dy)
    assert not np.any(np.isfinite(y[0, 4]))
    assert not np.any(np.isfinite(dw[0, 9]))
    assert np.all(np.isfinite(y[1]))


def test_empty_operands():
    y, dx, dw = product(jnp.ones((1, 0, 8)), jnp.ones((1, 8, 4)), jnp.ones((1, 0, 4)))
    assert (y.shape, dx.shape) == ((1, 0, 4), (1, 0, 8))
    assert not np.any(dw)


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan"), 10**400])
def test_bad_thresholds_are_named(threshold):
    with pytest.raises(ValueError, match=r"a number above 0 that float32 can .* got"):
        LlmInt8Dot(threshold=threshold)
