"""The reference of ``quantize``: its codes, bit for bit against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.scales import divide
from fbq_jax.kernels.sources import Matrix
from tests.kernels import quantize_cases as cases
from tests.kernels.quantize_cases import heavy, near
from tests.marks import with_first_fast


@functools.partial(jax.jit, static_argnames=("layout", "criterion"))
def quantize(x, layout, theta, criterion):
    """The rowwise codes of matrices, and the metric of their blocks."""
    options = {"rowwise": layout, "colwise": None, "criterion": criterion}
    found = reference.quantize(
        Matrix(x), jnp.zeros(len(x), jnp.uint32), theta, **options
    )
    return found.rowwise, found.metric


@pytest.mark.parametrize(
    "case",
    [
        *with_first_fast(cases.BLOCKS),
        *with_first_fast(cases.FALLBACK, 3),
        *with_first_fast(cases.VECTORS),
        cases.PER_TENSOR,
        *with_first_fast(cases.ROWS),
        *with_first_fast(cases.ROWS_AND_BLOCKS),
        *with_first_fast(cases.FLOAT8_BLOCKS),
        *with_first_fast(cases.FLOAT8_ROWS),
        *cases.special_blocks("float32"),
        *cases.special_vectors("float32"),
        *cases.special_rows("float32"),
        *cases.special_float8("float32"),
    ],
)
def test_codes_and_scales_are_bit_exact(case):
    found = cases.check_against_oracle(case)
    if case in cases.FALLBACK[:3]:  # Some blocks fall back, and some do not.
        used = found.rowwise.residual.scales > 0.0
        assert 0 < np.mean(used) < 1


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_per_tensor_scales_of_empty_operands(shape):
    def shapes(*layouts):
        options = dict(zip(("rowwise", "colwise"), layouts, strict=True))
        op = functools.partial(reference.quantize, **options)
        x = Matrix(jnp.zeros((1, *shape)))
        return jax.eval_shape(op, x, jnp.zeros(1, jnp.uint32))

    per_tensor = shapes(near(None, None), near(None, None))
    assert per_tensor == shapes(near(1, None), near(None, 1))


def test_a_block_whose_metric_equals_theta_does_not_fall_back():
    x = heavy((1, 64, 96))
    _, metric = quantize(x, near(32, 32), jnp.zeros(1), "absmax")
    theta = jnp.sort(metric.reshape(-1))[3:4]
    found, _ = quantize(x, near(32, 32), theta, "absmax")
    np.testing.assert_array_equal(found.residual.scales > 0.0, metric > theta[0])
    assert np.sum(found.residual.scales > 0.0) == 2


@pytest.mark.parametrize("criterion", ["l1", "l1_rel"])
def test_large_metrics(criterion):
    options = "criterion", "rowwise", "colwise"
    op = jax.jit(reference.quantize, static_argnames=options)
    cases.check_large_metrics(op, criterion)


def test_division_is_correctly_rounded():
    rng = np.random.default_rng(0)
    amax = np.exp(rng.uniform(np.log(2.0**-118), np.log(3.4e38), 500_000))
    edges = [2.0**-118, 127.0, np.nextafter(np.float32(127), 128), 3.4028235e38, 1.0]
    amax = np.maximum(np.append(amax, edges), 2.0**-118).astype(np.float32)
    top = np.full_like(amax, 127)
    quotient = jax.jit(divide)
    np.testing.assert_array_equal(quotient(top, amax), top / amax)
    np.testing.assert_array_equal(quotient(amax, top), amax / top)
