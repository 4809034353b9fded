"""What Linen and NNX share of weights that a training step quantizes once."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.core.dimension_numbers import DimensionNumbers, rhs_matrix
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.frozen_weight import Axes, check_axes, rhs_axes
from fbq_jax.core.gemms import quantize_rhs
from fbq_jax.core.spec import Spec
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.recipes.schema import Recipe


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes"],
    meta_fields=["axes", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class StepWeight:
    """The codes of a layer's weight, for all microbatches of a step.

    Attributes:
      codes: the codes that the layer's forward and backward products read.
      axes: the contracting and the batch dimensions of the product's right operand.
      dtype: the dtype of the right operand.
    """

    codes: Layouts
    axes: Axes
    dtype: Any

    def codes_for(
        self,
        layer: str,
        make: Callable[[], jax.Array],
        dimension_numbers: DimensionNumbers,
    ) -> Layouts:
        """The codes, for a product whose right operand ``make`` would make.

        Raises:
          ValueError: they are of a weight of another shape or dtype, or of another
            product.
        """
        check_axes(self.axes, dimension_numbers, layer)
        w = jax.eval_shape(lambda: rhs_matrix(make(), dimension_numbers))
        batch, rows, columns = w.shape
        rowwise, colwise = (x and x.shape for x in self.codes[:2])
        fits = rowwise in (None, w.shape) and colwise in (None, (batch, columns, rows))
        if not fits or self.dtype != w.dtype:
            raise ValueError(
                f"layer {layer!r} multiplies by {w.dtype}{list(w.shape)} and has codes "
                f"of {self.dtype}{list(rowwise or colwise or ())}: call "
                "quantize_weights_once with arguments of the types that the step "
                "passes, and slice codes of stacked layers as their parameters"
            )
        return self.codes


def quantize_step_weight(
    config: DotConfig, w: jax.Array, dimension_numbers: DimensionNumbers
) -> StepWeight:
    """Quantizes the right operand of a product, rounded to nearest, as it would."""
    spec = Spec(config.recipe, w.dtype, w.dtype, w.dtype, config.implementation)

    def quantize(matrices: jax.Array) -> Layouts:
        no_seed = jnp.zeros((), jnp.uint32)  # nearest rounding draws no noise
        return quantize_rhs(spec, matrices, None, no_seed, save=True)

    matrices = rhs_matrix(w, dimension_numbers)
    codes = _over_explicit_axes(quantize, matrices)(matrices)
    return StepWeight(codes, rhs_axes(dimension_numbers), w.dtype)


def quantizes_weights(recipe: Recipe) -> bool:
    """Whether a recipe quantizes weights at all."""
    return (recipe.fwd.rhs, recipe.dlhs.rhs) != (None, None)


def has_constant_codes(recipe: Recipe) -> bool:
    """Whether each call with a weight has the same codes of it."""
    roundings = recipe.fwd.rhs, recipe.dlhs.rhs
    return recipe.where_slower == "quantize" and "stochastic" not in roundings


def check_found(codes: object, left: Collection[str], stacklevel: int) -> None:
    """Warns about layers that ``quantize_weights_once`` leaves out.

    Args:
      codes: what it made; empty for none.
      left: the paths of layers that will quantize their weights in every call.
      stacklevel: of the warning, in the caller.

    Raises:
      ValueError: there are neither codes nor such layers.
    """
    if not codes and not left:
        raise ValueError(
            "quantize_weights_once found no layer that quantizes its kernel with a "
            "FallbackDot: pass the quantized model, and arguments that run its layers"
        )
    if left:
        warnings.warn(
            f"these layers quantize their weights in every call: "
            f"{', '.join(sorted(left))}. quantize_weights_once takes layers of Flax "
            "and fbq_jax that multiply by their parameter 'kernel' in this call, with "
            "nearest rounding and where_slower='quantize'",
            stacklevel=stacklevel + 1,
        )


def _over_explicit_axes(
    quantize: Callable[[jax.Array], Layouts], matrices: jax.Array
) -> Callable[[jax.Array], Layouts]:
    """Makes explicit mesh axes automatic inside; codes are sharded as the matrices."""
    sharding = jax.typeof(matrices).sharding
    if not sharding.mesh.explicit_axes:
        return quantize

    def sharding_of(array: jax.ShapeDtypeStruct, spec: tuple[Any, ...]) -> Any:
        fitting = (
            None
            if size % math.prod(sharding.mesh.shape[axis] for axis in axes)
            else axes
            for size, axes in zip(array.shape, map(_as_tuple, spec), strict=True)
        )
        return NamedSharding(sharding.mesh, PartitionSpec(*fitting))

    codes = jax.eval_shape(
        quantize, jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)
    )
    batch, rows, columns = sharding.spec
    rowwise, colwise = (
        jax.tree.map(functools.partial(sharding_of, spec=spec), layout)
        for layout, spec in zip(
            codes[:2], ((batch, rows, columns), (batch, columns, rows)), strict=True
        )
    )
    return jax.sharding.auto_axes(
        quantize,
        axes=sharding.mesh.explicit_axes,
        out_sharding=Layouts(rowwise, colwise),
    )


def _as_tuple(axes: Any) -> tuple[str, ...]:
    """The mesh axes of a dimension, in a ``PartitionSpec``."""
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)
