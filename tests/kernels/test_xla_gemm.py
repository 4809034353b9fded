"""The GEMM of operands with one scale per row: XLA's and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference, xla_gemm
from fbq_jax.kernels.reference import Quantized
from tests.kernels import gemm_cases
from tests.kernels.gemm_cases import Case

MATMULS = [
    jax.jit(module.matmul, static_argnames=("block_shape", "dtype"))
    for module in (xla_gemm, reference)
]


@pytest.mark.parametrize("matmul", MATMULS, ids=["xla", "reference"])
@pytest.mark.parametrize("shape", [(1, 70, 300, 90), (3, 33, 64, 20), (1, 1, 7, 1)])
def test_matches_float64(matmul, shape):
    case = Case(shape, (1, shape[2], 1), None)
    gemm_cases.check_against_float64(matmul, case)


@pytest.mark.parametrize("matmul", MATMULS, ids=["xla", "reference"])
def test_long_contraction_does_not_overflow(matmul):
    k = 140_000
    operand = Quantized(jnp.full((1, 2, k), 127, jnp.int8), jnp.full((1, 2, 1), 1e-3))
    y = matmul(operand, None, operand, block_shape=(1, k, 1), dtype=jnp.float32)
    np.testing.assert_allclose(y, 127 * 127 * k * 1e-6, rtol=1e-5)
