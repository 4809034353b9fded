"""LLM.int8(): vector-wise INT8, but for the columns of outliers (arXiv 2208.07339).

With ``O`` the columns (features) of X that hold a magnitude of at least ``threshold``
in some row, ``R`` codes with a scale a row and ``C`` codes with a scale a column,

    Y  = X_O . W_O + R(X - X_O) . C(W)
    dX = dY . C(W)'
    dW = X_O' . dY + C(X - X_O)' . C(dY)

where ``X_O`` is X with zeros outside of ``O``: the first products, and that with the
dequantized ``C(W)'``, are of floats, in the operands' dtype.  Rounding is to nearest, a
scale is ``amax / 127``.  The forward pass is the paper's (section 3); it is for
inference, and has no backward pass there.  The gradients are those of bitsandbytes'
``MatMul8bitLt``, which fine-tunes around frozen INT8 layers.

bitsandbytes differs in this (main branch, August 2026): it multiplies outliers by the
dequantized codes of W, and a row's scale counts the values below the threshold in
columns of outliers, too.  Two of its steps in dW are not repeated: it takes dY's codes
with a scale a row and scales them as if it were a column's; and where it adds an
outlier column's gradient, of floats, the INT8 product already has the part of those
values that are below the threshold.

``jit`` needs static shapes, so that a mask selects the columns and both products are
computed whole: this shows what the method computes, it is not fast.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core.dimension_numbers import DimensionNumbers, dot_general_of
from fbq_jax.core.matmul_vjp import RHS_NAME
from fbq_jax.kernels.reference import Quantized


@dataclasses.dataclass(frozen=True)
class LlmInt8Dot:
    """A ``dot_general`` that computes as LLM.int8() does, for Linen, NNX and plain JAX.

    It has no state.  The left operand is the activation.

    Attributes:
      threshold: a column with a magnitude of at least this stays in floats; above 0, in
        the units of the activation.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; by default
        ``fbq_jax.ops.dispatch`` chooses.

    >>> x = jnp.array([[0.5, 100.0], [-1.0, 0.1]])
    >>> w = jnp.array([[1.0], [0.01]])
    >>> llm_int8_dot(x, w, (((1,), (0,)), ((), ())))
    Array([[ 1.5  ],
           [-0.999]], dtype=float32)
    """

    threshold: float = 6.0
    implementation: str | None = None

    def __post_init__(self) -> None:
        if not self.threshold > 0.0:
            raise ValueError(
                f"LlmInt8Dot.threshold takes a number above 0; got {self.threshold!r}"
            )

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``lax.dot_general(lhs, rhs, ...)``, quantized but for outliers."""

        def matmul(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
            spec = Spec(self.threshold, dtype, w.dtype, self.implementation)
            return _matmul(spec, x, w)

        return dot_general_of(
            matmul,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding,
        )


llm_int8_dot = LlmInt8Dot()


class Spec(NamedTuple):
    """What is static: the threshold, the dtypes of Y and dW, who computes."""

    threshold: float
    dtype: Any
    rhs_dtype: Any
    implementation: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(spec: Spec, x: jax.Array, w: jax.Array) -> jax.Array:
    """``[B, M, K]`` times ``[B, K, N]``."""
    return _matmul_fwd(spec, x, w)[0]


def _matmul_fwd(
    spec: Spec, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, Quantized]]:
    outliers, rest = _split(x, spec.threshold)
    rows = ops.quantize_vectors(
        rest,
        _no_seeds(x),
        rowwise="nearest",
        colwise=None,
        implementation=spec.implementation,
    ).rowwise
    columns = _by_columns(spec, w)
    assert rows is not None
    y = _multiply(spec, rows, columns) + _multiply_floats(outliers, w)
    return y.astype(spec.dtype), (x, checkpoint_name(columns, RHS_NAME))


def _matmul_bwd(
    spec: Spec, saved: tuple[jax.Array, Quantized], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, (codes, scales) = saved
    outliers, rest = _split(x, spec.threshold)
    w_transposed = (codes.astype(jnp.float32) * scales).astype(x.dtype)
    dx = _multiply_floats(dy.astype(x.dtype), w_transposed)
    dw = _multiply(spec, _by_columns(spec, rest), _by_columns(spec, dy))
    dw += _multiply_floats(outliers.mT, dy.astype(x.dtype))
    return dx.astype(x.dtype), dw.astype(spec.rhs_dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _split(x: jax.Array, threshold: float) -> tuple[jax.Array, jax.Array]:
    """X in its columns of outliers, and in the others; zeros elsewhere."""
    is_outlier = jnp.any(jnp.abs(x) >= threshold, axis=1, keepdims=True)
    return jnp.where(is_outlier, x, 0.0), jnp.where(is_outlier, 0.0, x)


def _by_columns(spec: Spec, x: jax.Array) -> Quantized:
    """Codes ``[B, C, R]`` of ``[B, R, C]``, with a scale a column."""
    columns = ops.quantize_vectors(
        x,
        _no_seeds(x),
        rowwise=None,
        colwise="nearest",
        implementation=spec.implementation,
    ).colwise
    assert columns is not None
    return columns


def _no_seeds(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape[0], jnp.uint32)


def _multiply(spec: Spec, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """``[B, M, K]`` times ``[B, N, K]``, float32."""
    return ops.matmul(
        lhs,
        None,
        rhs,
        block_shape=(1, max(1, lhs.codes.shape[2]), 1),
        dtype=jnp.float32,
        implementation=spec.implementation,
    )


def _multiply_floats(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """``[B, M, K]`` times ``[B, K, N]``, accumulated in float32."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return lax.dot_general(
        lhs.astype(dtype),
        rhs.astype(dtype),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
