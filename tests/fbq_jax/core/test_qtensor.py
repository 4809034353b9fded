"""QTensor: a value that can be transposed, dequantized and multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import ops
from fbq_jax.core.qtensor import QTensor, matmul, quantize
from tests import oracle
from tests.kernels.test_reference import heavy

X = heavy((2, 100, 150))


def two_terms():
    """X with a residual in every block."""
    theta, seeds = jnp.zeros(2), jnp.zeros(2, jnp.uint32)
    main, residual, *_ = ops.quantize_fallback(
        X, theta, seeds, block=(32, 64), criterion="absmax", colwise=None
    )
    return QTensor(main, residual, (32, 64))


def test_dequantize_sums_both_terms():
    q = two_terms()
    exact = oracle.quantize_fallback(X[1], 0.0, (32, 64))[2]
    assert oracle.relative(q.dequantize()[1], exact) < 1e-6
    assert oracle.relative(q.dequantize(), X) < 1e-3
    assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


def test_a_transposed_copy_has_the_codes_of_the_original():
    """Transposing a stochastically quantized matrix only moves its codes."""
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
    with pytest.raises(ValueError, match="differ along the contraction: 64 and 32"):
        matmul(
            quantize(X, block=(32, 64)),
            quantize(X.mT, block=(32, 32)),
            dtype=jnp.float32,
        )
    lhs = quantize(X, block=(32, 64))
    with pytest.raises(ValueError, match="one term of rhs, and this rhs has a resid"):
        matmul(lhs, two_terms().mT, jnp.float32)


def test_a_qarray_of_qwix_has_the_same_values():
    qwix = pytest.importorskip("qwix")
    # Partial blocks along rows and along columns, and one scale for all columns.
    for block in (32, 50), (25, 64), (100, 150):
        q = quantize(X, block=block)
        array = q.to_qarray()
        assert isinstance(array, qwix.QArray)
        np.testing.assert_array_equal(qwix.dequantize(array), q.dequantize())
        back = QTensor.from_qarray(array)
        np.testing.assert_array_equal(back.main.codes, q.main.codes)
        np.testing.assert_array_equal(back.dequantize(), q.dequantize())


def test_a_qtensor_from_codes_of_qwix():
    qwix = pytest.importorskip("qwix")
    w = X[0, :96, :144]
    array = qwix.quantize(w, "int8", channelwise_axes=[1], tiled_axes={0: 48})
    q = QTensor.from_qarray(array)
    assert q.shape == (1, 96, 144)
    assert q.block == (48, 1)
    np.testing.assert_array_equal(q.dequantize()[0], qwix.dequantize(array))
    assert oracle.relative(q.dequantize()[0], w) < 0.02


def test_unsupported_qarrays_are_refused():
    qwix = pytest.importorskip("qwix")
    codes, scales = jnp.ones((4, 4), jnp.int8), jnp.ones((1, 1))
    four_bits = qwix.QArray(codes, scales, qtype="int4")
    with pytest.raises(ValueError, match="int8 without zero point; got int4"):
        QTensor.from_qarray(four_bits)
    with pytest.raises(ValueError, match="without zero point; got int8 with one"):
        QTensor.from_qarray(qwix.QArray(codes, scales, jnp.ones((1, 1))))
    with pytest.raises(ValueError, match=r"matrices, .* got \(4,\)"):
        QTensor.from_qarray(qwix.QArray(codes[0], scales[0]))
    with pytest.raises(ValueError, match="has one term"):
        two_terms().to_qarray()
