"""The frozen weight of a Linen layer, in the variable that also holds its state.

Lifted transformations such as ``nn.scan`` carry that variable already.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core.scope import Variable

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    FrozenWeight,
    active_recorder,
    check_axes,
    check_recipe,
    quantize_weight,
)
from fbq_jax.core.layer_stats import layer_path
from fbq_jax.core.qtensor import QTensor

#: The key of the ``FrozenWeight`` in the state of a layer.
WEIGHT = "weight"
#: The parameter that is the weight of a layer.
KERNEL = "kernel"


def layer_weight(
    config: DotConfig,
    module: nn.Module,
    variable: Variable,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
) -> QTensor | None:
    """The codes that a Linen layer multiplies by; None if the layer is not frozen.

    While ``freeze`` traces the model, the layer quantizes ``rhs`` and stores it in its
    variable.

    Args:
      config: the recipe and the implementation of the layer's dot.
      module: the layer.
      variable: holds the layer's state.
      rhs: the right operand of the product, made from the kernel.
      dimension_numbers: of the product.

    Raises:
      ValueError: parameters and state do not belong together, or the layer is frozen
        and trains, or has another recipe or product than before.
    """
    assert module.scope is not None
    kernel = module.scope.get_variable("params", KERNEL)
    layer = layer_path((*module.path, variable.name))
    recorder = active_recorder()
    if recorder is not None and recorder.report(layer, rhs, dimension_numbers):
        if WEIGHT not in variable.value:
            check_recipe(config.recipe, layer)
            weight = quantize_weight(config, variable.value, rhs, dimension_numbers)
            shape = jax.tree.leaves(kernel)[0].shape  # the kernel may be boxed
            weight = dataclasses.replace(weight, shape=shape)
            variable.value = {**variable.value, WEIGHT: weight}
        return variable.value[WEIGHT].codes
    weight = variable.value.get(WEIGHT)
    _check_pair(layer, kernel, weight, variable.collection)
    if weight is None:
        return None
    if module.is_mutable_collection(variable.collection):
        raise ValueError(
            f"layer {layer!r} is frozen and does not train: call apply without "
            f"mutable=[{variable.collection!r}], or train with the variables from "
            "before freeze"
        )
    if weight.recipe != config.recipe:
        raise ValueError(
            f"layer {layer!r} was frozen with {weight.recipe}, and its model has "
            f"{config.recipe}: use the recipe that it was trained with"
        )
    check_axes(weight.axes, dimension_numbers, layer)
    return weight.codes


def is_frozen(state: Mapping[str, Any]) -> bool:
    """Whether a layer is frozen, or ``freeze`` is tracing its model."""
    return WEIGHT in state or active_recorder() is not None


def _check_pair(
    layer: str, kernel: Any, weight: FrozenWeight | None, collection: str
) -> None:
    """Raises ValueError unless kernel and weight are both frozen or both are not."""
    stand_in = isinstance(kernel, FrozenKernel)
    if stand_in and weight is None:
        raise ValueError(
            f"layer {layer!r} is frozen, but has no codes in the collection "
            f"{collection!r}: pass apply all collections that freeze returned"
        )
    if weight is not None and not stand_in:
        raise ValueError(
            f"layer {layer!r} has both the codes of a frozen weight and an unquantized "
            "kernel: pass apply either all collections that freeze returned, or all "
            "from before"
        )
