"""LLM.int8(): vector-wise INT8 with unquantized outlier columns (arXiv 2208.07339).

Let ``O`` be the columns (features) of X with a magnitude of at least ``threshold`` in
some row, ``R`` codes with one scale per row and ``C`` codes with one scale per
column:

    Y  = X_O . W_O + R(X - X_O) . C(W)
    dX = dY . C(W)'
    dW = X_O' . dY + C(X - X_O)' . C(dY)

``X_O`` is X with zeros outside ``O``.  The products with ``X_O`` and with the
dequantized ``C(W)'`` run unquantized, in the operands' dtype.  Rounding is to nearest,
and a scale is ``amax / 127``.  The forward pass follows the paper (section 3), which
treats inference only.  The gradients follow ``MatMul8bitLt`` in bitsandbytes, which
fine-tunes around frozen INT8 layers.

bitsandbytes (main branch, August 2026) differs in two ways: it multiplies outliers by
the dequantized codes of W, and the scale of a row includes the values below the
threshold in outlier columns.  We do not reproduce two of its steps in dW.  It quantizes
dY with one scale per row, but rescales the codes as if they had one per column.  And it
adds the gradient of an outlier column to an INT8 product that already includes the
column's values below the threshold.

``jit`` needs static shapes, so a mask selects the columns and both products have full
size.  This implementation shows what the method computes; it is not fast.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core.arguments import DotArguments, DotGeneral, compute_as_matrices
from fbq_jax.core.gemms import RHS_NAME, float_matmul
from fbq_jax.kernels.quantized import Layout, Quantized
from fbq_jax.ops import dispatch
from fbq_jax.recipes.numbers_in_float32 import is_positive_float32


@dataclasses.dataclass(frozen=True)
class LlmInt8Dot(DotGeneral):
    """The ``dot_general`` of LLM.int8(), for Linen, NNX and plain JAX.

    It has no state.  The left operand is the activation.

    Attributes:
      threshold: a column with a magnitude of at least this stays unquantized; above 0,
        in the units of the activation.
      implementation: ``"mosaic"``, ``"triton"``, ``"tpu"`` or ``"reference"``;
        None lets ``fbq_jax.ops.dispatch`` choose.

    Raises:
      ValueError: the threshold is not above 0, or no implementation has this name.

    >>> x = jnp.array([[0.5, 100.0], [-1.0, 0.1]])
    >>> w = jnp.array([[1.0], [0.01]])
    >>> llm_int8_dot(x, w, (((1,), (0,)), ((), ())))
    Array([[ 1.5  ],
           [-0.999]], dtype=float32)
    """

    threshold: float = 6.0
    implementation: str | None = None

    def __post_init__(self) -> None:
        # Infinity quantizes every column.
        if not (self.threshold == math.inf or is_positive_float32(self.threshold)):
            raise ValueError(
                "LlmInt8Dot.threshold takes a number above 0 that float32 can "
                f"represent; got {self.threshold!r}"
            )
        dispatch.check_name(self.implementation)

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product, quantized except for outlier columns."""

        def matmul(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
            spec = Spec(self.threshold, dtype, w.dtype, self.implementation)
            return _matmul(spec, x, w)

        return compute_as_matrices(matmul, lhs, rhs, arguments)


llm_int8_dot = LlmInt8Dot()


class Spec(NamedTuple):
    """The static settings; ``dtype`` is for Y, ``rhs_dtype`` for dW."""

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
    rows, columns = _quantize(spec, rest, rowwise=True), _quantize(spec, w)
    y = _multiply(spec, rows, columns) + float_matmul(outliers, w, jnp.float32)
    return y.astype(spec.dtype), (x, checkpoint_name(columns, RHS_NAME))


def _matmul_bwd(
    spec: Spec, residuals: tuple[jax.Array, Quantized], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    outliers, rest = _split(x, spec.threshold)
    dx = float_matmul(dy, w.dequantize(spec.rhs_dtype), jnp.float32)
    dw = _multiply(spec, _quantize(spec, rest), _quantize(spec, dy))
    dw += float_matmul(outliers.mT, dy, jnp.float32)
    return dx.astype(x.dtype), dw.astype(spec.rhs_dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _split(x: jax.Array, threshold: float) -> tuple[jax.Array, jax.Array]:
    """The outlier columns of X and the other columns, each with zeros elsewhere."""
    is_outlier = jnp.any(jnp.abs(x) >= threshold, axis=1, keepdims=True)
    return jnp.where(is_outlier, x, 0.0), jnp.where(is_outlier, 0.0, x)


def _quantize(spec: Spec, x: jax.Array, *, rowwise: bool = False) -> Quantized:
    """Codes of ``[B, R, C]`` with one scale per row; or ``[B, C, R]``, per column."""
    layouts = ops.quantize(
        x,
        jnp.zeros(x.shape[0], jnp.uint32),  # nearest rounding reads no seeds
        rowwise=Layout("nearest", (1, None)) if rowwise else None,
        colwise=None if rowwise else Layout("nearest", (None, 1)),
        implementation=spec.implementation,
    )
    layout = layouts.rowwise if rowwise else layouts.colwise
    assert layout is not None
    return layout


def _multiply(spec: Spec, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """``[B, M, K]`` times ``[B, N, K]``, in float32."""
    return ops.matmul(lhs, rhs, dtype=jnp.float32, implementation=spec.implementation)
