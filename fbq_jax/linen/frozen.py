"""How the codes of a frozen layer reach its dot in Flax Linen.

They are in the layer's variable, which ``nn.scan`` and the like carry along already.
``fbq_jax.linen.freeze.freeze`` has them made by the layers themselves: it marks each
variable and applies the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn
from flax.core.scope import Variable

from fbq_jax.core import threshold
from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    check_axes,
    check_recipe,
    quantize_weight,
)
from fbq_jax.core.qtensor import QTensor

if TYPE_CHECKING:
    from fbq_jax.linen.dot import FallbackDot

#: Where a variable has its ``FrozenWeight``.
WEIGHT = "weight"
#: Where ``freeze`` asks for one: None, in whose place the layer puts it.
ASKED = "asked"
KERNEL = "kernel"


def layer_weight(
    dot: "FallbackDot",
    module: nn.Module,
    variable: Variable,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
) -> QTensor | None:
    """The codes by which a Linen layer multiplies, or None if it is not frozen.

    Where the variable asks for codes, they are made of ``rhs`` and put there, with the
    shape of the kernel, of which ``rhs`` may be another form.
    """
    state, layer = variable.value, "/".join(module.path) or "(root)"
    assert module.scope is not None
    kernel = module.scope.get_variable("params", KERNEL)
    stand_in = isinstance(kernel, FrozenKernel)
    if ASKED in state:
        if state[ASKED] is None:
            check_recipe(dot.recipe, layer)
            weight = quantize_weight(
                rhs,
                dimension_numbers,
                threshold.call_seed(threshold.canonicalize_state(state)),
                recipe=dot.recipe,
                implementation=dot.implementation,
            )
            shape = jax.tree.leaves(kernel)[0].shape  # boxed, it may be
            weight = dataclasses.replace(weight, shape=shape)
            variable.value = {**state, ASKED: weight}
        check_axes(variable.value[ASKED].axes, dimension_numbers, f"layer {layer!r}")
        return variable.value[ASKED].codes
    if WEIGHT not in state:
        if stand_in:
            raise ValueError(
                f"layer {layer!r} is frozen, but has no codes in the collection "
                f"{dot.collection!r}: pass apply all that freeze returned"
            )
        return None
    weight = state[WEIGHT]
    if not stand_in:
        raise ValueError(
            f"layer {layer!r} has both the codes of a frozen weight and a kernel in "
            "floats: pass apply all that freeze returned, or nothing of it"
        )
    if module.is_mutable_collection(dot.collection):
        raise ValueError(
            f"layer {layer!r} is frozen and does not train: call apply without "
            f"mutable=[{dot.collection!r}], or train with the variables from before "
            "freeze"
        )
    if weight.recipe != dot.recipe:
        raise ValueError(
            f"layer {layer!r} is frozen by {weight.recipe}, and its model has "
            f"{dot.recipe}: use the recipe that it was trained with"
        )
    check_axes(weight.axes, dimension_numbers, f"layer {layer!r}")
    return weight.codes


def is_frozen(state: Mapping[str, Any]) -> bool:
    """Whether a layer's state is that of a frozen one, or of one being frozen."""
    return WEIGHT in state or ASKED in state
