"""``lax.dot_general`` as one stack of matrix products."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import current_layer

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
DTYPE_NAMES = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
# JAX has several names for this precision.
_DEFAULT_PRECISIONS = (
    None,
    "default",
    "fastest",
    "bfloat16",
    lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.DEFAULT,
)

Operand = jax.Array | jax.ShapeDtypeStruct


def check_arrays(**operands: Any) -> None:
    """Raises TypeError unless all operands, given by name, are arrays."""
    for name, x in operands.items():
        if not (hasattr(x, "dtype") and hasattr(x, "shape")):
            raise TypeError(
                f"{_layer()}{name} is a {type(x).__name__}; a quantized dot takes "
                "arrays"
            )


def output_dtype(lhs: Operand, rhs: Operand, precision: Any, preferred: Any) -> Any:
    """The dtype of a product; ``preferred``, or else the operands' common dtype.

    Float16 and bfloat16 have the common dtype float32, as in ``jnp.matmul``.

    Raises:
      TypeError: an operand is not an array, or it or the output is not bfloat16,
        float16 or float32.
      ValueError: the precision is neither None nor DEFAULT.
    """
    check_arrays(lhs=lhs, rhs=rhs)
    dtypes = {"lhs": lhs.dtype, "rhs": rhs.dtype}
    if preferred is not None:
        dtypes["preferred_element_type"] = jnp.dtype(preferred)
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise TypeError(
                f"{_layer()}{name} is {dtype}; a quantized dot takes {DTYPE_NAMES}"
            )
    if is_requested(precision):
        raise ValueError(
            f"{_layer()}precision={precision} cannot be met: the recipe sets the "
            "precision of a quantized dot; pass None or DEFAULT, or "
            "ignore_precision=True to FallbackDot, RulesDot or the function that "
            "quantized the model"
        )
    return jnp.dtype(preferred or jnp.promote_types(lhs.dtype, rhs.dtype))


def _layer() -> str:
    """How an error names the layer that is being traced; empty outside any."""
    layer = current_layer()
    return f"layer {layer!r}: " if layer else ""


def is_requested(precision: Any) -> bool:
    """Whether a product asks for another precision than DEFAULT."""
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    return any(p not in _DEFAULT_PRECISIONS for p in pair)


def as_matrices(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    recipe: Recipe | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Transposes and reshapes the operands to ``[B, M, K]`` and ``[B, K, N]``.

    With a recipe, the rows of lhs have the shape of ``row_shape``.
    """
    (contract, _), (batch, _) = dimension_numbers
    free = _free(lhs, contract, batch)
    x = _group(lhs, batch, free, contract)
    if recipe is not None:
        rows = row_shape([lhs.shape[d] for d in free], recipe)
        x = x.reshape(x.shape[0], *rows, x.shape[-1])
    return x, rhs_matrix(rhs, dimension_numbers)


def row_shape(sizes: Sequence[int], recipe: Recipe) -> tuple[int, ...]:
    """The shape, ``(M,)`` or ``(G, R)``, that stands for an activation's rows.

    The last axis before K, often the tokens of a sequence, stays a separate axis if
    all GEMMs have block scales and its size is a multiple of the block's.  Then both it
    and the axes before it can be sharded.

    Args:
      sizes: the sizes of the activation's axes before K.
      recipe: gives the rows of a block.

    >>> recipe = Recipe(block=128)
    >>> row_shape((2, 4, 256), recipe), row_shape((2, 100), recipe)
    ((8, 256), (200,))
    """
    *lead, last = sizes or (1,)
    if not lead or 0 in sizes or last % recipe.block_shape[0] or not recipe.in_blocks:
        return (math.prod(sizes),)
    return math.prod(lead), last


def rhs_matrix(rhs: jax.Array, dimension_numbers: DimensionNumbers) -> jax.Array:
    """Transposes and reshapes rhs to ``[B, K, N]``."""
    (_, contract), (_, batch) = dimension_numbers
    return _group(rhs, batch, contract, _free(rhs, contract, batch))


def _group(x: jax.Array, *dims: Sequence[int]) -> jax.Array:
    """Makes one axis of each group of dimensions."""
    order = [d for group in dims for d in group]
    sizes = [math.prod(x.shape[d] for d in group) for group in dims]
    _check_symbolic(sizes)
    return x.transpose(order).reshape(sizes)


def _check_symbolic(sizes: Sequence[int]) -> None:
    """Raises ValueError if a symbolic size of a matrix may be below 1."""
    for size in filter(export.is_symbolic_dim, sizes):
        if jax.core.max_dim(size, 1) != size:
            raise ValueError(
                f"a quantized dot takes symbolic sizes of at least 1, and {size} may "
                "be less: export with a symbol for what is left, such as "
                "symbolic_shape('b, s + 1') where s of s + 1 tokens are multiplied, or "
                f"with symbolic_shape(..., constraints=['{size} >= 1'])"
            )


def _free(x: jax.Array, *taken: Sequence[int]) -> list[int]:
    """The dimensions that are neither contracted nor batch dimensions."""
    return [d for d in range(x.ndim) if not any(d in dims for dims in taken)]
