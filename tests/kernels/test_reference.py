"""The reference of ``quantize``: its codes, bit for bit against NumPy."""

import jax
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.scales import divide
from tests.kernels import quantize_cases as cases
from tests.marks import with_first_fast


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
