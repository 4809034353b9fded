"""Scaled FP8 and FP16 tensors: bits of a reference cast, unbiased noise."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fbq_jax.fp8 import scaled_tensor

DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16]
quantize = functools.partial(jax.jit, static_argnums=1)(scaled_tensor.quantize)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def wide(size: int) -> jax.Array:
    """Magnitudes from an FP8 format's largest value to below its smallest."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-40, 3, size).astype(np.float32)
    return jnp.asarray(rng.standard_normal(size, np.float32) * 2.0**exponents)


@every_dtype
def test_nearest_rounding_matches_the_reference_cast(dtype):
    x = wide(1 << 14)
    values, scale = quantize(x, dtype)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    factor = largest / np.abs(x).max()
    expected = np.clip(np.asarray(x) * factor, -largest, largest).astype(dtype)
    np.testing.assert_array_equal(values, expected)
    assert scale == np.float32(1) / factor
    assert np.abs(values.astype(jnp.float32)).max() == largest


@every_dtype
def test_stochastic_rounding_is_unbiased_and_picks_a_neighbour(dtype):
    points = wide(64).at[0].set(8.0)
    x = jnp.broadcast_to(points, (4096, 64))
    values, scale = quantize(x, dtype, jnp.uint32(7))
    exact = np.asarray(points, np.float64) / np.float64(scale)
    got = np.asarray(values, np.float64)

    nearest = exact.astype(np.float32).astype(dtype).astype(np.float64)
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    step = np.maximum(np.abs(nearest) * float(ml_dtypes.finfo(dtype).eps), tiny)
    assert np.all(np.abs(got - exact) <= step)
    # The largest value is exact in the format and in float32.
    assert np.all(got[:, 0] == ml_dtypes.finfo(dtype).max)
    error = got.mean(0) - exact
    assert np.all(
        np.abs(error) <= 5 * 0.5 * step / np.sqrt(4096) + 1e-6 * np.abs(exact)
    )


def test_zeros_and_subnormals_do_not_divide_by_zero():
    for x in (jnp.zeros((3, 2)), jnp.full((2,), 1e-40), jnp.zeros((0, 4))):
        assert not np.any(quantize(x, jnp.float8_e5m2).dequantize())
    small = jnp.array([1e-36, 5e-37])
    got = quantize(small, jnp.float8_e5m2).dequantize()
    np.testing.assert_allclose(got, small, rtol=0.125)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [3, 100_000])  # vector instructions may drop a NaN
def test_a_non_finite_value_turns_the_tensor_into_nan(bad, size):
    x = jnp.ones(size).at[size // 2].set(bad)
    got = quantize(x, jnp.float8_e4m3fn).dequantize()
    assert np.all(np.isnan(got))
