"""Equalization: rows and columns of W of one magnitude; X and Y make up for it.

The weights of a block share a scale.  So a row or a column of large weights costs the
others their precision, and a row of small ones has little itself.  Equalization
(arXiv 1906.04721, there of a trained network) multiplies rows and columns by powers of
two that make their mean magnitudes alike, and X and Y by the inverse powers::

    Y = X . W = ((X R) . (R^-1 W C^-1)) C        R, C diagonal

Without quantization no bit of Y changes.  The same holds for the gradients::

    dX = ((dY C) . (R^-1 W C^-1)') R        dW = X' . dY

W has no part in dW, and neither have its factors.  A channel of X whose weights are
small shrinks in ``X R``, with its outliers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.core.serialization import serializable_namedtuple

_SHIFT, _BIAS = 23, 127  # of the exponent in the bits of a float32
_FRACTION = 4  # bits of means
_LARGEST = 60  # so that the product of two factors is a normal float32
_GROUP, _COUNT_BITS = 16, 8  # of sums that share a word


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
        return Exponents(-self.rows, -self.columns).restore(x).astype(wide(x.dtype))

    def restore(self, x: jax.Array) -> jax.Array:
        """``R x C``, float32."""
        # One product, which does not leave the range if only one factor is large.
        both = factors(self.rows)[:, :, None] * factors(self.columns)[:, None]
        return x.astype(jnp.float32) * both


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
    of_rows = (jnp.sum(x, 2, dtype=jnp.int32) for x in (exponent, counted))
    rows = _powers(*of_rows)
    rest = exponent - rows[:, :, None] * counted
    return Exponents(rows, _powers(*_column_sums(rest, counted)))


def _column_sums(
    exponent: jax.Array, counted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sums both along columns.

    Both summands share a word, and so do their sums over a few rows.  XLA for GPUs
    would write both to memory to sum them apart, which takes several times as long.
    """
    batch, rows, columns = exponent.shape
    words = (exponent << _COUNT_BITS) + counted
    words = jnp.pad(words, ((0, 0), (0, -rows % _GROUP), (0, 0)))
    words = words.reshape(batch, -(-rows // _GROUP), _GROUP, columns)
    words = jnp.sum(words, 2, dtype=jnp.int32)
    total = jnp.sum(words >> _COUNT_BITS, 1, dtype=jnp.int32)
    return total, jnp.sum(words & 2**_COUNT_BITS - 1, 1, dtype=jnp.int32)


def _powers(total: jax.Array, number: jax.Array) -> jax.Array:
    """By how much means exceed the mean of all, rounded; 0 for those of no values.

    Args:
      total: int32 ``[B, size]``, sums of exponents.
      number: int32 ``[B, size]``, the number of summands.
    """
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


def factors(exponents: jax.Array) -> jax.Array:
    """The powers of two with these exponents, float32."""
    return lax.bitcast_convert_type((exponents + _BIAS) << _SHIFT, jnp.float32)


def multiply(x: jax.Array, exponents: jax.Array, axis: int) -> jax.Array:
    """Multiplies ``x [B, ...]`` by the powers of two ``[B, size]`` along an axis."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = exponents.shape
    return x * factors(exponents).reshape(shape).astype(x.dtype)
