"""The arguments that a Flax layer gives its ``dot_general``, as one value."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from fbq_jax.core.dimension_numbers import (
    DimensionNumbers,
    Operand,
    as_matrices,
    output_dtype,
)
from fbq_jax.sharding.explicit_axes import automatic
from fbq_jax.sharding.manual_axes import as_varying


class DotArguments(NamedTuple):
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

    def output(self, lhs: Operand, rhs: Operand) -> jax.core.ShapedArray:
        """The output's shape, dtype and sharding.

        Raises:
          TypeError: an operand or the output has another dtype than bfloat16, float16
            and float32, or ``lax.dot_general`` raises it.
          ValueError: the call asks for a precision, or ``lax.dot_general`` raises it.
        """
        dtype = output_dtype(lhs, rhs, self.precision, self.preferred_element_type)

        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return lax.dot_general(
                lhs.astype(dtype),
                rhs.astype(dtype),
                self.dimension_numbers,
                out_sharding=self.out_sharding,
            )

        # If the mesh also has automatic axes, eval_shape leaves the sharding out.
        (out,) = jax.make_jaxpr(product)(lhs, rhs).out_avals
        return out

    def sizes(self, lhs: Operand, out: jax.core.ShapedArray) -> tuple[int, int, int]:
        """M, K and N of each matrix product; of one device's, over explicit mesh axes.

        Args:
          lhs: the left operand.
          out: the ``output`` of the call.
        """
        (contract, _), (batch, _) = self.dimension_numbers
        lhs_shape, out_shape = _shard_shape(jax.typeof(lhs)), _shard_shape(out)
        first_column = lhs.ndim - len(contract)
        return (
            math.prod(out_shape[len(batch) : first_column]),
            math.prod(lhs_shape[axis] for axis in contract),
            math.prod(out_shape[first_column:]),
        )


def _shard_shape(x: Any) -> tuple[int, ...]:
    """The shape of a device's shard; the shape itself, over automatic mesh axes."""
    if x.sharding is None:
        return tuple(x.shape)
    sizes, shape = x.sharding.mesh.shape, list(x.shape)
    for axis, names in enumerate(x.sharding.spec):
        names = names if isinstance(names, tuple) else (names,)
        shape[axis] //= math.prod(sizes.get(name, 1) for name in names)
    return tuple(shape)


class DotGeneral:
    """A callable like ``lax.dot_general``; ``_compute`` is abstract."""

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
        arguments = DotArguments(
            dimension_numbers, precision, preferred_element_type, out_sharding
        )
        return self._compute(lhs, rhs, arguments)

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product; each subclass implements it."""
        raise NotImplementedError


def compute_as_matrices(
    matmul: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    arguments: DotArguments,
    *state: Any,
) -> jax.Array:
    """``lax.dot_general(lhs, rhs, ...)`` computed by ``matmul``.

    Args:
      matmul: maps ``[B, M, K]``, ``[B, K, N]``, the output's dtype and ``*state`` to
        ``[B, M, N]``.
      lhs: bfloat16, float16 or float32.
      rhs: bfloat16, float16 or float32.
      arguments: the other arguments.
      *state: trees of arrays.

    Raises:
      TypeError: an operand or the output has another dtype.
      ValueError: the call asks for a precision, or the dimensions do not fit.
    """
    out = arguments.output(lhs, rhs)

    def multiply(
        lhs: jax.Array, rhs: jax.Array, state: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[()]]:
        matrices = as_varying(as_matrices(lhs, rhs, arguments.dimension_numbers))
        return matmul(*matrices, out.dtype, *state).reshape(out.shape), ()

    return automatic(multiply, out)(lhs, rhs, state)[0]
