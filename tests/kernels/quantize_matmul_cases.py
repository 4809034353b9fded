"""Checks that a product of an unquantized lhs has the bits of the quantized one's."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels import reference
from fbq_jax.kernels.quantized import Quantized, Unquantized
from tests.kernels import gemm_cases, quantize_cases
from tests.kernels.quantize_cases import heavy


class Case(NamedTuple):
    """One product of values.

    Attributes:
      shape: ``(B, M, K, N)``.
      blocks: ``(m, k, n)``, the block shape.
      theta: a threshold for each matrix; None for no fallback.
      dtype: dtype of the values.
    """

    shape: tuple[int, int, int, int]
    blocks: tuple[int, int, int]
    theta: tuple[float, ...] | None
    dtype: str = "bfloat16"


_quantize = jax.jit(reference.quantize_nearest)
SQUARE = 128, 128, 128
CASES = {
    "one row": Case((1, 1, 256, 128), SQUARE, None),
    "eight rows, fallback": Case((1, 8, 512, 160), SQUARE, (20.0,)),
    "unaligned": Case((2, 5, 333, 190), SQUARE, (30.0, np.nan), "float32"),
    "many K blocks": Case((1, 3, 2200, 100), SQUARE, (50.0,), "float16"),
    "every block falls back": Case((1, 32, 260, 64), (32, 64, 32), (0.0,)),
    "no block falls back": Case((1, 7, 260, 64), (256, 32, 64), (np.inf,), "float32"),
    "one element": Case((3, 1, 1, 1), SQUARE, (0.0, -1.0, 1e9), "float32"),
    "64x256x32 blocks": Case((1, 30, 600, 100), (64, 256, 32), (20.0,)),
    "scales of rows": Case((2, 20, 300, 200), (1, 128, 128), None),
    "scales of rows and columns": Case((1, 9, 200, 90), (1, 32, 1), None, "float16"),
    "scales of columns": Case((1, 13, 260, 100), (64, 64, 1), (20.0,)),
}


def operands(case: Case) -> tuple[Unquantized, Quantized]:
    """Both operands of a case."""
    (batch, M, K, N), (m, k, n), theta, dtype = case
    x = heavy((batch, M, K), dtype=dtype)
    thetas = jnp.asarray(theta or (0.0,) * batch, jnp.float32)
    _, rhs = gemm_cases.operands(gemm_cases.Case((batch, M, K, N), (m, k, n), None))
    return Unquantized(x, thetas, (m, k), theta and "absmax"), rhs


def check(matmul, case: Case) -> None:
    _check(matmul, *operands(case))


def check_special(matmul, dtype: str, fallback: bool) -> None:
    """Checks blocks with NaN, Inf, zeros and extreme values."""
    case = Case((3, 32, 5 * 64, 40), (32, 64, 32), None, dtype)
    case = case._replace(theta=(0.0, 1.0, 1e6) if fallback else None)
    x = quantize_cases.special(dtype, (32, 64))
    x = jnp.moveaxis(x, 1, 2).reshape(case.shape[:3])
    lhs, rhs = operands(case)
    got = _check(matmul, dataclasses.replace(lhs, values=x), rhs)
    assert 0 < np.isnan(got).mean() < 1


def _check(matmul, lhs: Unquantized, rhs: Quantized) -> np.ndarray:
    got = matmul(lhs, rhs, dtype=jnp.float32)
    want = matmul(_quantize(lhs), rhs, dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    return np.asarray(got)
