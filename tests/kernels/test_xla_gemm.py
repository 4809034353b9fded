"""The GEMM of operands with one scale per row: XLA's and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference, xla_gemm
from fbq_jax.kernels.quantized import Quantized, Term
from tests import oracle
from tests.kernels import gemm_cases
from tests.kernels.gemm_cases import Case

MATMULS = [
    jax.jit(module.matmul, static_argnames="dtype") for module in (xla_gemm, reference)
]


@pytest.mark.parametrize("matmul", MATMULS, ids=["xla", "reference"])
@pytest.mark.parametrize("shape", [(1, 70, 300, 90), (3, 33, 64, 20), (1, 1, 7, 1)])
def test_matches_float64(matmul, shape):
    lhs, rhs = gemm_cases.operands(Case(shape, (1, shape[2], 1), None))
    x, y = (Quantized(operand.main, None, (1, None)) for operand in (lhs, rhs))
    product = matmul(x, y, dtype=jnp.float32)
    assert oracle.relative(product, gemm_cases.exact(lhs, rhs)) <= 1e-5


@pytest.mark.parametrize("matmul", MATMULS, ids=["xla", "reference"])
def test_long_contraction_does_not_overflow(matmul):
    k = 140_000
    term = Term(jnp.full((1, 2, k), 127, jnp.int8), jnp.full((1, 2, 1), 1e-3))
    operand = Quantized(term, None, (1, None))
    y = matmul(operand, operand, dtype=jnp.float32)
    np.testing.assert_allclose(y, 127 * 127 * k * 1e-6, rtol=1e-5)
