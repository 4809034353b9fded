"""The arguments of ``lax.dot_general``: as one value, checked, and as matrices.

Any product of two arrays is one stack of matrix products, ``[B, M, K]`` times
``[B, K, N]``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import current_layer
from fbq_jax.sharding.mesh_axes import as_varying, run_over_auto_axes

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

    return run_over_auto_axes(multiply, out, lhs, rhs, state)[0]


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
