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

_SHIFT, _BIAS = 23, 127  # of the exponent in the bits of a float32
_FRACTION = 4  # bits of means
_LARGEST = 60  # so that the product of two factors is a normal float32


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

    Means are of ``floor(log2 |w|)``, in sixteenths: a few large weights hardly move
    them, and every device and order of summation gives the same integers.  Their
    difference is rounded, so that rows and columns of one magnitude have powers of 0.
    Zeros do not count.

    Args:
      w: ``[B, K, N]``.

    >>> w = jnp.array([[[1.0, 4.0], [8.0, 32.0]]])
    >>> rows, columns = exponents(w)
    >>> rows.tolist(), columns.tolist()
    ([[-1, 2]], [[-1, 1]])
    """
    bits = lax.bitcast_convert_type(w.astype(jnp.float32), jnp.int32)
    exponent = (bits >> _SHIFT) & 0xFF  # plus the bias; 0 for zeros
    rows, columns = (_means(exponent << _FRACTION, axis) for axis in (2, 1))
    mean = _means(rows, axis=1)[:, None]
    return Exponents(_powers(rows, mean), _powers(columns, mean))


def _powers(means: jax.Array, mean: jax.Array) -> jax.Array:
    """The differences of means from that of all, rounded; 0 for a mean of 0."""
    powers = (means - mean + 2 ** (_FRACTION - 1)) >> _FRACTION
    return jnp.clip(jnp.where(means > 0, powers, 0), -_LARGEST, _LARGEST)


def _means(values: jax.Array, axis: int) -> jax.Array:
    """Means of the positive values along an axis, rounded down; 0 if there are none.

    Comparisons would make XLA store which values count, as an array of W's size.
    """
    number = jnp.sum(jnp.minimum(values, 1), axis, dtype=jnp.int32)
    return jnp.sum(values, axis, dtype=jnp.int32) // jnp.maximum(number, 1)


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
