"""Quantized: a value that can be transposed, dequantized and multiplied."""

import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import Quantized, ops
from fbq_jax.kernels.quantized import Layout
from tests import oracle
from tests.kernels.quantize_cases import heavy

X = heavy((2, 100, 150))
SEEDS = jnp.asarray([1, 2], jnp.uint32)


def quantize(x, block, rounding="nearest", **options):
    layout = Layout(rounding, block)
    return ops.quantize(x, SEEDS, rowwise=layout, colwise=None, **options).rowwise


def two_terms():
    """X with a residual in every block."""
    return quantize(X, (32, 64), theta=jnp.zeros(2), criterion="absmax")


def test_dequantize_sums_both_terms():
    q = two_terms()
    exact = oracle.quantize_fallback(X[1], 0.0, (32, 64))[2]
    assert oracle.relative(q.dequantize()[1], exact) < 1e-6
    assert oracle.relative(q.dequantize(), X) < 1e-3
    assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("block", [(32, 64), (1, 64), (1, None)])
def test_a_transposed_copy_has_the_codes_of_the_original(block):
    """Transposing a stochastically quantized matrix only moves its codes."""
    q = quantize(X, block, "stochastic")
    assert q.mT.block == block[::-1]
    assert q.mT.shape == (2, 150, 100)
    np.testing.assert_array_equal(q.mT.codes, q.codes.swapaxes(1, 2))
    np.testing.assert_array_equal(q.mT.dequantize(), q.dequantize().swapaxes(1, 2))
    assert oracle.relative(q.dequantize(), X) < 0.2


def test_operands_that_do_not_fit_are_named():
    lhs = quantize(X, (32, 64))
    with pytest.raises(ValueError, match="differ along the contraction: 64 and 32"):
        ops.matmul(lhs, quantize(X, (32, 32)), dtype=jnp.float32)
    with pytest.raises(ValueError, match="one term of rhs, and this rhs has a resid"):
        ops.matmul(lhs, two_terms(), dtype=jnp.float32)


def test_a_qarray_of_qwix_has_the_same_values():
    qwix = pytest.importorskip("qwix")
    from fbq_jax.contrib.qwix import from_qarray, to_qarray

    # Partial blocks along rows and along columns, and one scale for all columns.
    for block in (32, 50), (25, 64), (100, 150), (1, None):
        q = quantize(X, block)
        array = to_qarray(q)
        assert isinstance(array, qwix.QArray)
        np.testing.assert_array_equal(qwix.dequantize(array), q.dequantize())
        back = from_qarray(array)
        np.testing.assert_array_equal(back.codes, q.codes)
        np.testing.assert_array_equal(back.dequantize(), q.dequantize())


def test_codes_of_qwix():
    qwix = pytest.importorskip("qwix")
    from fbq_jax.contrib.qwix import from_qarray

    w = X[0, :96, :144]
    array = qwix.quantize(w, "int8", channelwise_axes=[1], tiled_axes={0: 48})
    q = from_qarray(array)
    assert isinstance(q, Quantized)
    assert q.shape == (1, 96, 144)
    assert q.block == (48, 1)
    np.testing.assert_array_equal(q.dequantize()[0], qwix.dequantize(array))
    assert oracle.relative(q.dequantize()[0], w) < 0.02


def test_unsupported_qarrays_are_refused():
    qwix = pytest.importorskip("qwix")
    from fbq_jax.contrib.qwix import from_qarray, to_qarray

    codes, scales = jnp.ones((4, 4), jnp.int8), jnp.ones((1, 1))
    four_bits = qwix.QArray(codes, scales, qtype="int4")
    with pytest.raises(ValueError, match="int8 without zero point; got int4"):
        from_qarray(four_bits)
    with pytest.raises(ValueError, match="without zero point; got int8 with one"):
        from_qarray(qwix.QArray(codes, scales, jnp.ones((1, 1))))
    with pytest.raises(ValueError, match=r"matrices, .* got \(4,\)"):
        from_qarray(qwix.QArray(codes[0], scales[0]))
    with pytest.raises(ValueError, match="has one term"):
        to_qarray(two_terms())
