"""What stands in for weights in the variables of a frozen Linen model."""

import dataclasses
from typing import Any, ClassVar

import jax

from fbq_jax.core.frozen_weight import FrozenKernel, has_both
from fbq_jax.core.serialization import serializable_static
from fbq_jax.core.visitors import WeightCodes
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.linen.state import WEIGHT


@serializable_static
@dataclasses.dataclass(frozen=True)
class FrozenParameter(FrozenKernel):
    """A ``FrozenKernel`` that a model's own code multiplies by.

    In models of ``fbq_jax.contrib.qwix.quantize`` that code reads an array in its
    place.
    """

    def __jax_array__(self) -> jax.Array:
        raise ValueError(
            f"a parameter of shape {self.shape} is frozen to INT8 codes, and this "
            "model's code does not reach them: use the model that was trained"
        )


@serializable_static
@dataclasses.dataclass(frozen=True)
class SharedWeight(WeightCodes):
    """Stands in for a ``FrozenWeight`` in states of steps that share it.

    The parameters have that, under the name of the state.
    """

    is_frozen: ClassVar[bool] = True

    def codes_for(self, product: Any) -> Layouts:
        """The codes, for the product of a layer (``LayerWeight``).

        Raises:
          ValueError: the parameters do not have them, or as in ``FrozenWeight``.
        """
        shared = product.module.get_variable("params", product.variable.name)
        if shared:
            codes: Layouts = shared[WEIGHT].codes_for(product)
            return codes
        if product.has_stand_in:
            raise product.lacks_codes("params")
        raise has_both(product.layer)
