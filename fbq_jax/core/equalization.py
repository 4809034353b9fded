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
    """The powers of two by which rows of W, and then columns, exceed the mean.

    Means are of ``floor(log2 |w|)``, in sixteenths: a few large weights hardly move
    them, and every device and order of summation gives the same integers.  Their
    difference is rounded, so that rows and columns of one magnitude have powers of 0.
    Columns are those of ``R^-1 W``: a part of W that is small and has zeros beside it
    is then enlarged once, not by its rows and by its columns.  Zeros, NaN and Inf do
    not count.

    Args:
      w: ``[B, K, N]``.

    >>> w = jnp.array([[[1.0, 4.0], [8.0, 32.0]]])
    >>> rows, columns = exponents(w)
    >>> rows.tolist(), columns.tolist()
    ([[-1, 2]], [[-1, 1]])
    """
    bits = lax.bitcast_convert_type(w.astype(jnp.float32), jnp.int32)
    biased = lax.rem((bits >> _SHIFT) & 0xFF, 255)  # 0 for what does not count
    counted = jnp.minimum(biased, 1)
    exponent = biased - _BIAS * counted
    rows = _powers(exponent, counted, axis=2)
    rest = exponent - rows[:, :, None] * counted
    return Exponents(rows, _powers(rest, counted, axis=1))


def _powers(exponent: jax.Array, counted: jax.Array, axis: int) -> jax.Array:
    """By how much means along an axis exceed their mean, rounded; 0 without values."""
    total = jnp.sum(exponent, axis, dtype=jnp.int32)
    number = jnp.sum(counted, axis, dtype=jnp.int32)
    exist, number = number > 0, jnp.maximum(number, 1)
    # In sixteenths, without a product that leaves int32.
    whole, remainder = jnp.divmod(total, number)
    means = (whole << _FRACTION) + (remainder << _FRACTION) // number
    of_all = jnp.sum(jnp.where(exist, means, 0), 1, keepdims=True, dtype=jnp.int32)
    of_all //= jnp.maximum(jnp.sum(exist, 1, keepdims=True, dtype=jnp.int32), 1)
    powers = (means - of_all + 2 ** (_FRACTION - 1)) >> _FRACTION
    return jnp.clip(jnp.where(exist, powers, 0), -_LARGEST, _LARGEST)


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
