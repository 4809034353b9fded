"""Noise that is unbiased, uncorrelated, tied to its element; rounding to float16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from fbq_jax import ops
from fbq_jax.kernels import layer_sources, rounding
from fbq_jax.kernels.quantized import Layout
from tests import oracle
from tests.gpus import h200s, needs_compiler

SEEDS = jnp.arange(2048, dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(rows: int, columns: int, seeds: jax.Array) -> jax.Array:
    return jax.vmap(lambda seed: rounding.noise(seed, rows, columns))(seeds)


def draws(rows: int, columns: int, seeds: jax.Array = SEEDS) -> np.ndarray:
    return np.asarray(draw(rows, columns, seeds))


def test_matches_the_hash_written_in_numpy():
    seeds = (0, 1, 2**31, 2**32 - 1)
    got = draws(130, 70, jnp.asarray(seeds, jnp.uint32))
    for seed, noise in zip(seeds, got, strict=True):
        np.testing.assert_array_equal(noise, oracle.noise(seed, (130, 70)))


@pytest.mark.parametrize("half", [0, 1])
def test_noise_is_uniform_in_the_open_interval(half):
    """Even rows use the low half of a word, odd rows the high half."""
    noise = draws(64, 64)[:, half::2]
    assert noise.min() >= -0.5 + 2.0**-16
    assert noise.max() <= 0.5 - 2.0**-16
    for values in (noise, noise * 2.0**7 % 1.0):  # The upper and the lower bits.
        counts = np.histogram(values % 1.0, bins=256, range=(0.0, 1.0))[0]
        assert stats.chisquare(counts).pvalue > 1e-4


def test_rounding_is_unbiased():
    """A chi-square test, over 2048 seeds, of how often each fraction rounds up."""
    fractions = np.linspace(0.005, 0.995, 199, dtype=np.float32)
    values = np.concatenate([[127.0], 12.0 + fractions, -77.0 - fractions])
    x = jnp.broadcast_to(jnp.asarray(values, jnp.float32), (SEEDS.size, 1, 399))
    layout = Layout("stochastic", (32, 512))
    codes = ops.quantize(x, SEEDS, rowwise=layout, colwise=None).rowwise.codes
    up = np.asarray(codes[:, 0, 1:200] == 13).sum(0)
    down = np.asarray(codes[:, 0, 200:] == -78).sum(0)
    n = SEEDS.size
    expected, variance = n * fractions, n * fractions * (1 - fractions)
    for count in (up, down):
        statistic = np.sum((count - expected) ** 2 / variance)
        assert 1e-4 < stats.chi2(fractions.size).sf(statistic) < 1 - 1e-4


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation, in standard deviations of that of independent noise."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size)


def test_seeds_rows_and_columns_are_uncorrelated():
    noise = draws(64, 64, SEEDS[:256])
    folded = draws(64, 64, rounding.fold(jnp.uint32(7), SEEDS[:256]))
    assert abs(correlation(noise[1:], noise[:-1])) < 4.5
    assert abs(correlation(noise[:, 1:], noise[:, :-1])) < 4.5
    assert abs(correlation(noise[:, :, 1:], noise[:, :, :-1])) < 4.5
    below, above = np.tril_indices(64, -1), np.triu_indices(64, 1)
    transposed = noise.swapaxes(1, 2)
    assert abs(correlation(noise[:, *above], transposed[:, *above])) < 4.5
    assert abs(correlation(noise[:, *above], noise[:, *below])) < 4.5
    assert abs(correlation(noise, folded)) < 4.5


def test_the_two_rows_of_a_word_are_independent():
    noise = draws(64, 64, SEEDS[:256])
    even, odd = noise[:, ::2], noise[:, 1::2]
    assert abs(correlation(even, odd)) < 4.5
    assert abs(correlation(even[:, 1:], odd[:, :-1])) < 4.5
    counts = np.histogram2d(even.ravel(), odd.ravel(), bins=16)[0]
    assert stats.chisquare(counts, axis=None).pvalue > 1e-4
    # Each row is tested, because only a few keys could be bad.
    products = np.mean(12 * even * odd, axis=2) * 8
    assert np.abs(products).max() < 5.5
    assert np.var(products) == pytest.approx(1.0, abs=0.06)


def test_corners_of_a_rectangle_are_independent():
    """Noise that is a sum of row and column hashes would cancel around a rectangle."""
    noise = draws(64, 64, SEEDS[:256])
    for rows in (noise[:, ::2], noise[:, 1::2]):
        a, b = rows[:, ::2, ::2], rows[:, 1::2, ::2]
        c, d = rows[:, ::2, 1::2], rows[:, 1::2, 1::2]
        counts = np.histogram((a - b - c + d) % 1.0, bins=64, range=(0.0, 1.0))[0]
        assert stats.chisquare(counts).pvalue > 1e-4
        assert abs(correlation(a * d, b * c)) < 4.5


@jax.jit
def rounded(x):
    """Rounds to float16; XLA may remove the casts."""
    return layer_sources.round_to(x, jnp.float16).astype(jnp.float32)


@pytest.mark.parametrize("largest", [2.0**-14, 2.0**-20, 1.0, 1e5])
def test_float16_has_the_values_of_a_cast(largest):
    """Subnormal numbers, ties between them, normal numbers and overflows."""
    steps = np.arange(-(2**13), 2**13 + 1) / 2**13
    x = np.float32(largest * steps)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded(x), np.float16(x).astype(np.float32))


@needs_compiler
def test_a_gpu_rounds_subnormal_numbers_of_float16():
    """XLA removes a sum and its inverse."""
    sharding = NamedSharding(h200s(1, "x"), PartitionSpec())
    x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=sharding)
    text = rounded.lower(x).compile().as_text()
    assert "round-nearest-even(" in text
    assert "reduce-precision(" in text
