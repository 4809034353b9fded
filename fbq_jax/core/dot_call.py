"""The call that a Flax layer makes to its ``dot_general``, as one value."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.core.dimension_numbers import (
    DimensionNumbers,
    as_matrices,
    check_operands,
    output_of,
)


class DotCall(NamedTuple):
    """The arguments of ``lax.dot_general`` other than its operands, under its names.

    Attributes:
      dimension_numbers: the contracting dimensions of lhs and rhs, and their batch
        dimensions.
      precision: None or DEFAULT; the recipe sets the precision of a quantized dot.
      preferred_element_type: the output's dtype; None takes the operands' common one.
      out_sharding: the output's sharding over explicit mesh axes.
    """

    dimension_numbers: DimensionNumbers
    precision: Any = None
    preferred_element_type: jax.typing.DTypeLike | None = None
    out_sharding: Any = None

    def output_dtype(self, lhs: jax.Array, rhs: jax.Array) -> Any:
        """The dtype of the product of these operands."""
        return jnp.dtype(
            self.preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        )


class DotGeneral:
    """A callable with the signature of ``lax.dot_general``; ``compute`` is abstract."""

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
        """``lax.dot_general(lhs, rhs, ...)``, quantized; lhs is the activation."""
        call = DotCall(
            dimension_numbers, precision, preferred_element_type, out_sharding
        )
        return self.compute(lhs, rhs, call)

    def compute(self, lhs: jax.Array, rhs: jax.Array, call: DotCall) -> jax.Array:
        """Computes the product; each subclass implements it."""
        raise NotImplementedError


def compute_as_matrices(
    matmul: Callable[[jax.Array, jax.Array, Any], jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    call: DotCall,
) -> jax.Array:
    """``lax.dot_general(lhs, rhs, ...)`` computed by ``matmul``.

    Args:
      matmul: maps ``[B, M, K]``, ``[B, K, N]`` and the output's dtype to ``[B, M, N]``.
      lhs: bfloat16, float16 or float32.
      rhs: bfloat16, float16 or float32.
      call: the other arguments.

    Raises:
      TypeError: an operand or the output has another dtype.
      ValueError: the call asks for a precision, or the dimensions do not fit.
    """
    check_operands(lhs, rhs, call.precision, call.preferred_element_type)
    dtype = call.output_dtype(lhs, rhs)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)]
    out = output_of(shapes[0], shapes[1], call.dimension_numbers, dtype, None)
    matrices = as_matrices(lhs, rhs, call.dimension_numbers)
    y = matmul(*matrices, dtype).reshape(out.shape)
    if call.out_sharding is None:
        return y
    return jax.sharding.reshard(y, call.out_sharding)
