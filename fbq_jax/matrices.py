"""``lax.dot_general`` by way of one product of matrices, for what defines no more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.dot_general import (
    DimensionNumbers,
    _as_matrices,
    _check_operands,
    _output_shape,
)


def dot_general_of(
    matmul: Callable[[jax.Array, jax.Array, Any], jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    out_sharding: Any,
) -> jax.Array:
    """``lax.dot_general(lhs, rhs, ...)`` computed by ``matmul``.

    Args:
      matmul: of ``[B, M, K]``, ``[B, K, N]`` and the output's dtype: ``[B, M, N]``.
      lhs: bfloat16, float16 or float32.
      rhs: likewise.
      dimension_numbers: as for ``lax.dot_general``.
      precision: None or DEFAULT; ``matmul`` has its own.
      preferred_element_type: the output's dtype; by default the operands' common one.
      out_sharding: the output's sharding, over explicit mesh axes.

    Raises:
      TypeError: an operand is not of a float dtype above.
      ValueError: another precision is asked for, or the dimensions do not fit.
    """
    _check_operands(lhs, rhs, precision, preferred_element_type)
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    out = _output_shape(lhs, rhs, dimension_numbers, dtype)
    y = matmul(*_as_matrices(lhs, rhs, dimension_numbers), dtype).reshape(out.shape)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
