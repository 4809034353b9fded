"""The numerics helpers for the tests of users."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import Recipe, testing
from fbq_jax.testing import array_error, assert_dot_close, dot_errors
from tests.kernels.quantize_cases import heavy

X = jax.random.normal(jax.random.key(0), (128, 192))
W = jax.random.normal(jax.random.key(1), (192, 64))
SMALL = Recipe(block=32)
PLAIN = Recipe(block=32, criterion=None)


def test_figures_of_a_known_difference():
    exact = np.array([[3.0, 0.0], [0.0, 4.0]])
    error = array_error([[3.0, 0.0], [1.0, 4.0]], exact)
    assert error.relative == pytest.approx(0.2)
    assert error.cosine == pytest.approx(25 / (5 * np.sqrt(26)))
    assert error.worst == pytest.approx(1.0 / 2.5)
    assert error.where == (1, 0)
    assert array_error(exact, exact)[:2] == (0.0, pytest.approx(1.0))


def test_degenerate_arrays():
    zeros = np.zeros((2, 2))
    assert array_error(zeros, zeros) == (0.0, 1.0, 0.0, (0, 0))
    assert array_error(np.ones((2, 2)), zeros).relative == np.inf
    assert np.isnan(array_error(np.full((2, 2), np.nan), np.ones((2, 2))).relative)
    with pytest.raises(ValueError, match="shapes"):
        array_error(zeros, np.zeros(3))


@pytest.mark.exhaustive
def test_int8_is_near_and_fallback_is_nearer():
    errors = dot_errors(X, W, recipe=PLAIN)
    assert 1e-3 < errors.out.relative < 0.02
    assert max(errors.dlhs.relative, errors.drhs.relative) < 0.03
    assert min(error.cosine for error in errors) > 0.999
    x = heavy(X.shape)
    plain = dot_errors(x, W, recipe=PLAIN)
    full = dot_errors(x, W, recipe=SMALL, theta=0.0)
    assert full.out.relative < 0.5 * plain.out.relative


def test_equal_shapes_are_compiled_once():
    def programs(x, theta):
        lists = [[1], [0]], [[], []]
        dot_errors(x, W, lists, recipe=SMALL, theta=theta, key=jax.random.key(0))
        return testing._product_and_gradients._cache_size()

    assert programs(X, 2.0) == programs(-X, 3.0)


def test_the_assertion_names_what_is_far():
    assert_dot_close(X, W, relative=0.03, cosine=0.999)
    with pytest.raises(AssertionError) as failure:
        assert_dot_close(X, W, relative=1e-3, recipe=PLAIN)
    last = failure.traceback.filter(failure)[-1]  # what pytest shows
    assert last.path == Path(__file__)
    text = str(failure.value)
    assert "out, dlhs, drhs of the quantized dot_general: wanted relative" in text
    assert text.count("\n") == 4
    with pytest.raises(AssertionError):
        assert_dot_close(X.at[0, 0].set(jnp.nan), W, relative=10.0, cosine=-1.0)
