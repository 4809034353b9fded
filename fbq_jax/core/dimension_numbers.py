"""``lax.dot_general`` by way of one product of matrices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


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
    check_operands(lhs, rhs, precision, preferred_element_type)
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    lhs_shape, rhs_shape = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs))
    out = output_of(lhs_shape, rhs_shape, dimension_numbers, dtype, None)
    y = matmul(*as_matrices(lhs, rhs, dimension_numbers), dtype).reshape(out.shape)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def check_operands(
    lhs: jax.Array, rhs: jax.Array, precision: Any, preferred: Any
) -> None:
    """Raises what ``dot_general_of`` says."""
    accepted = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
    dtypes = {"lhs": lhs.dtype, "rhs": rhs.dtype}
    if preferred is not None:
        dtypes["preferred_element_type"] = jnp.dtype(preferred)
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {dtype}; a quantized dot takes {accepted}")
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if any(p not in (None, "default", lax.Precision.DEFAULT) for p in pair):
        raise ValueError(
            f"precision={precision} cannot be met: the recipe sets the precision of a "
            "quantized dot; pass None or DEFAULT"
        )


def output_of(
    lhs: jax.Array | jax.ShapeDtypeStruct,
    rhs: jax.Array | jax.ShapeDtypeStruct,
    dimension_numbers: DimensionNumbers,
    dtype: Any,
    out_sharding: Any,
) -> jax.ShapeDtypeStruct:
    """The output's shape and sharding, or ``lax.dot_general``'s own error."""

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(
            lhs.astype(dtype),
            rhs.astype(dtype),
            dimension_numbers,
            out_sharding=out_sharding,
        )

    return jax.eval_shape(product, lhs, rhs)


def as_matrices(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    rows_of: Callable[[Sequence[int]], tuple[int, ...]] = lambda sizes: (
        math.prod(sizes),
    ),
) -> tuple[jax.Array, jax.Array]:
    """Transposes and reshapes to ``[B, M, K]`` and ``[B, K, N]``.

    ``rows_of`` makes more axes of M, given the sizes that lhs has there.
    """
    (contract, _), (batch, _) = dimension_numbers
    free = _free(lhs, contract, batch)
    rows = rows_of([lhs.shape[d] for d in free])
    x = _group(lhs, batch, free, contract)
    x = x.reshape(len(x), *rows, x.shape[-1])
    return x, rhs_matrix(rhs, dimension_numbers)


def rhs_matrix(rhs: jax.Array, dimension_numbers: DimensionNumbers) -> jax.Array:
    """Transposes and reshapes rhs to ``[B, K, N]``."""
    (_, contract), (_, batch) = dimension_numbers
    return _group(rhs, batch, contract, _free(rhs, contract, batch))


def _group(x: jax.Array, *dims: Sequence[int]) -> jax.Array:
    order = [d for group in dims for d in group]
    sizes = [math.prod(x.shape[d] for d in group) for group in dims]
    return x.transpose(order).reshape(sizes)


def _free(x: jax.Array, *taken: Sequence[int]) -> list[int]:
    return [d for d in range(x.ndim) if not any(d in dims for dims in taken)]
