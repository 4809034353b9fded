"""Weights that are INT8 codes, for layers that no longer train.

A frozen layer has the codes of its weight where its dot has its state, as the forward
GEMM reads them.  In the place of the kernel is a ``FrozenKernel``, which has a shape
and a dtype but no bytes: a layer such as ``nn.Dense`` looks at its kernel, and casts
it, before it hands it to ``dot_general``.  So the layer computes in the dtypes of its
training, and the dot takes the codes.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.core.dimension_numbers import DimensionNumbers, rhs_matrix
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.quantize_operands import Spec, quantize_rhs
from fbq_jax.recipes.schema import Recipe

# Of a product's right operand: those contracted, and those of the batch.
Axes = tuple[tuple[int, ...], tuple[int, ...]]


@jax.tree_util.register_static
@dataclass(frozen=True)
class FrozenKernel:
    """What a frozen layer has for a kernel: a pytree without leaves.

    JAX reads it as an array of NaNs, which costs nothing where it is compiled, because
    the dot does not read them; nothing else can take them for weights.

    Attributes:
      shape: of the kernel, without axes of layers that are stacked.
      dtype: of the kernel as a parameter.
    """

    shape: tuple[int, ...]
    dtype: Any

    def __jax_array__(self) -> jax.Array:
        return jnp.full(self.shape, jnp.nan, self.dtype)

    def __getitem__(self, index: Any) -> "FrozenKernel":
        """``kernel[...]``, as NNX's layers read their variables."""
        if index is not ...:
            raise TypeError("a frozen kernel has no elements: its layer holds codes")
        return self


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes"],
    meta_fields=["recipe", "shape", "axes"],
)
@dataclass(frozen=True)
class FrozenWeight:
    """A layer's weight as its forward GEMM reads it.

    Attributes:
      codes: W by columns, ``[B, N, K]``, with an axis of layers before where they are
        stacked; ``codes.mT`` is W.
      recipe: by which it was quantized.
      shape: of the kernel that it was made of.
      axes: of the operand that the kernel became, those contracted and the batch's.
    """

    codes: QTensor
    recipe: Recipe
    shape: tuple[int, ...]
    axes: Axes


def quantize_weight(
    w: jax.Array,
    dimension_numbers: DimensionNumbers,
    seed: jax.Array,
    *,
    recipe: Recipe,
    implementation: str | None,
) -> FrozenWeight:
    """Quantizes the right operand of a ``dot_general`` as its forward pass does.

    Args:
      w: the operand, of any rank, in the dtype that the layer computes in.
      dimension_numbers: of the product.
      seed: uint32 ``[]``, of a call's noise; ``threshold.call_seed`` gives it.
      recipe: with a forward GEMM in INT8.
      implementation: of the ops.
    """
    spec = Spec(recipe, w.dtype, w.dtype, w.dtype, implementation)
    matrices = rhs_matrix(w, dimension_numbers)
    main = quantize_rhs(spec, matrices, seed, save=False).colwise
    assert main is not None
    k, n = recipe.rhs_block
    block = (n, k) if recipe.fwd.in_blocks else (1, max(1, matrices.shape[1]))
    codes = QTensor(main, None, block)
    return FrozenWeight(codes, recipe, w.shape, rhs_axes(dimension_numbers))


def rhs_axes(dimension_numbers: DimensionNumbers) -> Axes:
    """The axes of the right operand that decide in what order its codes are."""
    (_, contract), (_, batch) = dimension_numbers
    return tuple(contract), tuple(batch)


def check_axes(axes: Axes, dimension_numbers: DimensionNumbers, layer: str) -> None:
    """Raises ValueError if a layer multiplies by its codes as another product does."""
    if (others := rhs_axes(dimension_numbers)) != axes:
        raise ValueError(
            f"{layer} has codes for one product, over the axes {axes[0]} of its kernel "
            f"(batch {axes[1]}), and is called for another, over {others[0]} (batch "
            f"{others[1]}): freeze takes layers that multiply in one way"
        )


def check_recipe(recipe: Recipe, layer: str) -> None:
    """Raises ValueError if the recipe's forward pass reads no codes of a weight."""
    if recipe.fwd.in_floats:
        raise ValueError(
            f"layer {layer!r} has no codes to freeze: its recipe multiplies in floats "
            "in the forward pass (Recipe.fwd); freeze takes those that do in INT8"
        )


def check_thetas(states: Mapping[str, tuple[Recipe, Any]]) -> None:
    """Raises ValueError where a threshold that decides what falls back is not set.

    Args:
      states: layer path to its recipe and theta, which is not looked at while traced.
    """
    unset = [
        layer
        for layer, (recipe, theta) in states.items()
        if recipe.criterion is not None
        and not isinstance(theta, jax.core.Tracer)
        and not bool(jnp.all(theta > 0.0))
    ]
    if unset:
        raise ValueError(
            f"freeze takes trained layers; there is no threshold yet (theta is below "
            f"0) in: {', '.join(unset)}. A training forward sets it, or Recipe.start"
        )


def zeros(x: Any) -> Any:
    """An array for an abstract one; what freeze runs on reaches no weight."""
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
