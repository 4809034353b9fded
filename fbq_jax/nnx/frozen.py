"""How the codes of a frozen layer reach its dot in Flax NNX.

They are a variable of the dot.  ``fbq_jax.nnx.freeze.freeze`` makes them, of what the
layers, run once, say of how they multiply.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.core.frozen_weight import Axes, check_axes, rhs_axes
from fbq_jax.core.qtensor import QTensor
from fbq_jax.recipes.schema import Recipe


class FrozenCodes(nnx.Variable):
    """The codes of a frozen layer's weight, a ``QTensor`` as in ``FrozenWeight``."""


@dataclass(eq=False)
class Call:
    """How a layer multiplies, which it writes down when it is traced.

    Attributes:
      layer: its path.
      shape: of what it multiplies by, without axes of layers that are stacked.
      dtype: in which it multiplies.
      dimension_numbers: of the product; None until there was one.
    """

    layer: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    dimension_numbers: DimensionNumbers | None = None


class FreezableDot(nnx.Module):
    """A ``dot_general`` whose weight ``freeze`` can turn into codes."""

    theta: nnx.Variable
    rate: nnx.Variable
    count: nnx.Variable
    seed: nnx.Variable
    use_running_average: bool

    def __init__(self, recipe: Recipe, implementation: str | None):
        self.recipe = recipe
        self.implementation = implementation
        self.weight: FrozenCodes | None = None
        self.axes: Axes = (), ()
        self.call: Call | None = None

    def state(self) -> dict[str, jax.Array]:
        """What the layer carries on: ``fbq_jax.core.threshold.State``."""
        names = ("theta", "rate", "count", "seed")
        return {name: getattr(self, name)[...] for name in names}

    def codes_of(
        self, rhs: jax.Array, dimension_numbers: DimensionNumbers
    ) -> QTensor | None:
        """The codes by which the layer multiplies, or None if it is not frozen."""
        if (call := self.call) is not None:
            if call.dimension_numbers is not None:
                axes = rhs_axes(call.dimension_numbers)
                check_axes(axes, dimension_numbers, f"layer {call.layer!r}")
            call.shape, call.dtype = rhs.shape, rhs.dtype
            call.dimension_numbers = dimension_numbers
        if self.weight is None:
            return None
        if not self.use_running_average:
            raise ValueError(
                "a frozen layer does not train: leave the model that freeze returned "
                "in evaluation (model.eval()), or train the one from before"
            )
        check_axes(self.axes, dimension_numbers, "a frozen layer")
        return self.weight.get_value()
