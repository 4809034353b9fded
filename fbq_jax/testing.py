"""The error of a quantized ``dot_general``, for unit tests.

>>> import jax
>>> x = jax.random.normal(jax.random.key(0), (16, 32))
>>> w = jax.random.normal(jax.random.key(1), (32, 8))
>>> errors = dot_errors(x, w)
>>> errors.out.relative < 0.02
True
>>> assert_dot_close(x, w, relative=0.02)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax.core.arguments import DimensionNumbers
from fbq_jax.core.dot_general import dot_general
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe

MATMUL: DimensionNumbers = (((1,), (0,)), ((), ()))


class Error(NamedTuple):
    """The difference between an array and the exact one.

    Attributes:
      relative: the Frobenius norm of the difference, over the norm of the exact array.
      cosine: the cosine similarity of the two arrays as vectors.
      worst: the largest absolute difference of an element, over the root mean square of
        the exact array.
      where: the index of that element.
    """

    relative: float
    cosine: float
    worst: float
    where: tuple[int, ...]


class DotErrors(NamedTuple):
    """The errors of a product and of its gradients.

    Attributes:
      out: of the product.
      dlhs: of the gradient of lhs.
      drhs: of the gradient of rhs.
    """

    out: Error
    dlhs: Error
    drhs: Error

    def __str__(self) -> str:
        """A table with one row per array."""
        rows = [f"{'':6}{'relative':>12}{'cosine':>12}{'worst/rms':>12}  at"]
        for name, error in self._asdict().items():
            rows.append(
                f"{name:6}{error.relative:12.3e}{error.cosine:12.6f}"
                f"{error.worst:12.3e}  {error.where}"
            )
        return "\n".join(rows)


def array_error(actual: Any, exact: Any) -> Error:
    """Compares two arrays in float64.

    If both are all zeros, ``relative`` is 0 and ``cosine`` is 1.  A NaN in either array
    makes all figures NaN.

    Args:
      actual: the array to judge.
      exact: the reference, of the same shape.

    Returns:
      The ``Error``.

    Raises:
      ValueError: the shapes differ.
    """
    actual = np.asarray(actual, np.float64)
    exact = np.asarray(exact, np.float64)
    if actual.shape != exact.shape:
        raise ValueError(f"the shapes {actual.shape} and {exact.shape} differ")
    difference = np.abs(actual - exact)
    norm, other = np.linalg.norm(exact), np.linalg.norm(actual)
    if norm == 0.0 and other == 0.0:
        return Error(0.0, 1.0, 0.0, (0,) * exact.ndim)
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = np.unravel_index(np.argmax(difference), difference.shape)
        return Error(
            float(np.linalg.norm(difference) / norm),
            float(np.vdot(actual, exact) / (norm * other)),
            float(difference[worst] / (norm / np.sqrt(exact.size))),
            tuple(int(i) for i in worst),
        )


def dot_errors(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers = MATMUL,
    *,
    recipe: Recipe = fallback,
    theta: float | None = None,
    key: jax.Array | None = None,
    cotangent: jax.Array | None = None,
) -> DotErrors:
    """Measures the errors of a recipe's product and gradients.

    The reference is ``lax.dot_general`` of the same operands in float32 at the highest
    precision.  The quantized product runs in the operands' dtype.

    Args:
      lhs: the activation, whose blocks may fall back; bfloat16, float16 or float32, of
        a shape as in ``lax.dot_general``.
      rhs: the weight, of one of these dtypes.
      dimension_numbers: as in ``lax.dot_general``; by default a matrix product.
      recipe: how the three GEMMs are quantized.
      theta: the threshold; None takes the quantile of lhs' own blocks.
      key: a PRNG key for stochastic rounding and the default cotangent.
      cotangent: the output's gradient; None draws it from a standard normal
        distribution.

    Returns:
      The ``DotErrors``.

    Raises:
      TypeError: as in ``fbq_jax.dot_general``.
      ValueError: as in ``fbq_jax.dot_general``.
    """
    key = jax.random.key(0) if key is None else key
    noise_key, cotangent_key = jax.random.split(key)
    scalars: dict[str, Any] = {"theta": theta, "key": noise_key}
    product = functools.partial(_product, dimension_numbers, recipe, scalars)
    out = jax.eval_shape(product, lhs, rhs)
    if cotangent is None:
        cotangent = jax.random.normal(cotangent_key, out.shape, out.dtype)
    contract, batch = ((tuple(left), tuple(right)) for left, right in dimension_numbers)
    operands = (lhs, rhs, cotangent)
    run = functools.partial(_product_and_gradients, (contract, batch))
    arrays = run(recipe, scalars, *operands)
    exact = run(None, {}, *(operand.astype(jnp.float32) for operand in operands))
    return DotErrors(*map(array_error, arrays, exact))


def _product(
    dimension_numbers: DimensionNumbers,
    recipe: Recipe | None,
    scalars: dict[str, Any],
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """The product by a recipe, or without one at the highest precision."""
    if recipe is None:
        return lax.dot_general(lhs, rhs, dimension_numbers, lax.Precision.HIGHEST)
    return dot_general(lhs, rhs, dimension_numbers, recipe=recipe, **scalars)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _product_and_gradients(
    dimension_numbers: DimensionNumbers,
    recipe: Recipe | None,
    scalars: dict[str, Any],
    lhs: jax.Array,
    rhs: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, ...]:
    product = functools.partial(_product, dimension_numbers, recipe, scalars)
    out, vjp = jax.vjp(product, lhs, rhs)
    return out, *vjp(cotangent)


def assert_dot_close(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers = MATMUL,
    *,
    relative: float,
    cosine: float = 0.0,
    **options: Any,
) -> None:
    """Asserts that a recipe's product and gradients are close to the exact ones.

    Args:
      lhs: the activation.
      rhs: the weight.
      dimension_numbers: as in ``lax.dot_general``; by default a matrix product.
      relative: the largest accepted ``Error.relative`` of the output and both
        gradients.
      cosine: the smallest accepted ``Error.cosine``.
      **options: further arguments of ``dot_errors``.

    Raises:
      AssertionError: an error is too large; the message names the arrays and has a
        table of all errors.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    errors = dot_errors(lhs, rhs, dimension_numbers, **options)
    failed = [
        name
        for name, error in errors._asdict().items()
        if not (error.relative <= relative and error.cosine >= cosine)
    ]
    if failed:
        raise AssertionError(
            f"{', '.join(failed)} of the quantized dot_general: wanted relative <= "
            f"{relative:g} and cosine >= {cosine:g}, got\n{errors}"
        )
