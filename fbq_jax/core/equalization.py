"""Equalization: rows and columns of W of one magnitude; X and Y make up for it.

The weights of a block share a scale.  So a row or a column of large weights costs the
others their precision, and a row of small ones has little itself.  Equalization
(arXiv 1906.04721, there of a trained network) multiplies rows and columns by powers of
two that make their mean magnitudes alike, and X and Y by the inverse powers::

    Y = X . W = ((X R) . (R^-1 W C^-1)) C        R, C diagonal

Without quantization no bit of Y changes.  R and C are constants in differentiation, so
the backward pass multiplies by them as well::

    dX = ((dY C) . (R^-1 W C^-1)') R        dW = R^-1 ((X R)' . (dY C)) C^-1

A channel of X whose weights are small shrinks in ``X R``, with its outliers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.core.serialization import serializable_namedtuple

# The exponents of float32: the lowest bit of the field, and its largest value, which
# belongs to infinities and NaN.
_SHIFT, _BIAS, _NOT_FINITE = 23, 127, 255
# Weights further below the largest count as this many powers of two below it.
_RANGE = 32


class Exponents(NamedTuple):
    """The powers of two that multiply rows and columns of matrices ``[B, R, C]``.

    Attributes:
      rows: int32 ``[B, R]``.
      columns: int32 ``[B, C]``.
    """

    rows: jax.Array
    columns: jax.Array

    @property
    def mT(self) -> "Exponents":  # noqa: N802 (NumPy's name)
        """Those of the transposed matrices."""
        return Exponents(self.columns, self.rows)

    def remove(self, x: jax.Array) -> jax.Array:
        """``R^-1 x C^-1``, in ``wide``'s dtype."""
        x = x.astype(wide(x.dtype))
        return multiply(multiply(x, -self.rows, 1), -self.columns, 2)

    def restore(self, x: jax.Array) -> jax.Array:
        """``R x C``."""
        return multiply(multiply(x, self.rows, 1), self.columns, 2)


serializable_namedtuple(Exponents)


@jax.jit
def exponents(w: jax.Array) -> Exponents:
    """The powers of two by which the rows and columns of W exceed the mean.

    Means are of ``floor(log2 |w|)``, in integers: a few large weights hardly move them,
    and every device and order of summation gives the same.  Zeros do not count, nor do
    values that are not finite.

    Args:
      w: ``[B, K, N]``.

    >>> w = jnp.array([[[1.0, 4.0], [8.0, 32.0]]])
    >>> rows, columns = exponents(w)
    >>> rows.tolist(), columns.tolist()
    ([[-1, 2]], [[-1, 1]])
    """
    bits = lax.bitcast_convert_type(w.astype(jnp.float32), jnp.int32)
    field = (bits >> _SHIFT) & _NOT_FINITE
    counts = (field > 0) & (field < _NOT_FINITE)
    field = jnp.where(counts, field, 0)
    top = jnp.max(field, axis=(1, 2), keepdims=True, initial=0)
    below = jnp.where(counts, jnp.maximum(field - top, -_RANGE), 0)
    rows, of_rows = _means(below, counts, axis=2)
    columns, of_columns = _means(below, counts, axis=1)
    mean, _ = _means(rows, of_rows, axis=1)
    return Exponents(
        jnp.where(of_rows, rows - mean[:, None], 0),
        jnp.where(of_columns, columns - mean[:, None], 0),
    )


def _means(
    values: jax.Array, counts: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Means along an axis, rounded down, of what counts; and where anything does."""
    number = jnp.sum(counts, axis, dtype=jnp.int32)
    total = jnp.sum(values, axis, dtype=jnp.int32)
    return total // jnp.maximum(number, 1), number > 0


def wide(dtype: Any) -> Any:
    """The dtype in which operands of a dtype are equalized.

    It is float32 for float16, whose range is small.
    """
    return jnp.float32 if dtype == jnp.float16 else dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def multiply(x: jax.Array, powers: jax.Array, axis: int) -> jax.Array:
    """Multiplies ``x [B, ...]`` by the powers of two ``[B, size]`` along an axis.

    The backward pass needs the powers only; without a rule of its own it would save
    them with the shape of x.
    """
    factors = lax.bitcast_convert_type((powers + _BIAS) << _SHIFT, jnp.float32)
    shape = [1] * x.ndim
    shape[0], shape[axis] = powers.shape
    return x * factors.reshape(shape).astype(x.dtype)


def _multiply_fwd(
    x: jax.Array, powers: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    return multiply(x, powers, axis), powers


def _multiply_bwd(
    axis: int, powers: jax.Array, dy: jax.Array
) -> tuple[jax.Array, None]:
    return multiply(dy, powers, axis), None


multiply.defvjp(_multiply_fwd, _multiply_bwd)
