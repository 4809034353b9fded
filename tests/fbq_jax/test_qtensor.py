"""QTensor: a value that can be transposed, dequantized and multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.qtensor import matmul, quantize, quantize_fallback
from tests import oracle
from tests.kernels.test_reference import heavy

X = heavy((2, 100, 150))


def test_dequantize_sums_both_terms():
    q, _ = quantize_fallback(X, jnp.float32(0.0), block=(32, 64))
    exact = oracle.quantize_fallback(X[1], 0.0, (32, 64))[2]
    assert oracle.relative(q.dequantize()[1], exact) < 1e-6
    assert oracle.relative(q.dequantize(), X) < 1e-3
    assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


def test_a_transposed_copy_has_the_codes_of_the_original():
    """Quantizing with stochastic noise, then transposing, moves codes only."""
    seeds = jnp.asarray([1, 2], jnp.uint32)
    q = quantize(X, block=(32, 64), rounding="stochastic", seeds=seeds)
    assert q.mT.block == (64, 32)
    assert q.mT.shape == (2, 150, 100)
    np.testing.assert_array_equal(q.mT.main.codes, q.main.codes.swapaxes(1, 2))
    np.testing.assert_array_equal(q.mT.dequantize(), q.dequantize().swapaxes(1, 2))


def test_it_is_a_pytree():
    q = quantize(X, block=(32, 64))
    again = jax.jit(lambda q: q)(q)
    assert again.block == (32, 64)
    np.testing.assert_array_equal(q.main.codes, again.main.codes)


def test_errors():
    with pytest.raises(ValueError, match="stochastic rounding needs seeds"):
        quantize(X, block=(32, 32), rounding="stochastic")
    with pytest.raises(ValueError, match="blocks of 64 and 32 along the contraction"):
        matmul(
            quantize(X, block=(32, 64)),
            quantize(X.mT, block=(32, 32)),
            dtype=jnp.float32,
        )
