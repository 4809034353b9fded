"""The frozen weight of a Linen layer, in the variable that also holds its state.

Lifted transformations such as ``nn.scan`` carry that variable already.  Where they have
a state for each step, or example, but share the parameters, the weight is with the
parameters.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core.scope import Variable

from fbq_jax.core import threshold
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
from fbq_jax.core.serialization import serializable_static
from fbq_jax.kernels.quantized import Quantized
from fbq_jax.linen.state import state_of
from fbq_jax.recipes.presets import describe_recipe

#: The key of the ``FrozenWeight`` in the state of a layer.
WEIGHT = "weight"
#: The parameter that is the weight of a layer.
KERNEL = "kernel"


class Parameter(NamedTuple):
    """A parameter that a layer multiplies by.

    Attributes:
      path: its path in the model's parameters.
      value: an array, which may be boxed, or a ``FrozenKernel``; None if there is no
        such parameter.
      own_code: whether the model's own code multiplies by it, not the op of a layer.
    """

    path: tuple[str, ...]
    value: Any
    own_code: bool = False

    def name_in(self, module: nn.Module) -> str:
        """Its path inside a module, or its name if it belongs to an outer one."""
        outer = module.path
        inside = self.path[: len(outer)] == outer
        return "/".join(self.path[len(outer) :] if inside else self.path[-1:])


@serializable_static
@dataclasses.dataclass(frozen=True)
class FrozenParameter(FrozenKernel):
    """A ``FrozenKernel`` that a model's own code multiplies by.

    In models of ``fbq_jax.integrations.qwix.quantize`` that code reads an array in its
    place.
    """

    def __jax_array__(self) -> jax.Array:
        raise ValueError(
            f"a parameter of shape {self.shape} is frozen to INT8 codes, and this "
            "model's code does not reach them: use the model that was trained"
        )


@serializable_static
@dataclasses.dataclass(frozen=True)
class SharedWeight:
    """Stands in for a ``FrozenWeight`` in states of steps that share it."""


def kernel_of(module: nn.Module) -> Parameter:
    """The kernel of a layer."""
    assert module.scope is not None
    kernel = module.scope.get_variable("params", KERNEL)
    return Parameter((*module.path, KERNEL), kernel)


def layer_weight(
    config: DotConfig,
    module: nn.Module,
    variable: Variable,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    parameter: Parameter,
) -> Quantized | None:
    """The codes that a Linen layer multiplies by; None if the layer is not frozen.

    While ``freeze`` traces the model, the layer quantizes ``rhs`` and stores it in its
    variable.  A layer that a model applies to the weight of another module, as it may a
    head that shares the embedding's, stays unfrozen: that module keeps the weight.

    Args:
      config: the recipe and the implementation of the layer's dot.
      module: the layer.
      variable: holds the layer's state.
      rhs: the right operand of the product, made from the parameter.
      dimension_numbers: of the product.
      parameter: the layer's weight.

    Raises:
      ValueError: parameters and state do not belong together, or the layer is frozen
        and trains, or has another recipe or product than before; or ``freeze`` finds no
        kernel.
    """
    layer = layer_path((*module.path, variable.name))
    recorder = active_recorder()
    if recorder is not None and parameter.value is None and not _has_params(module):
        recorder.skip(layer)
        recorder.borrowing.add(layer)
        return None
    if recorder is not None and recorder.report(
        layer, rhs, dimension_numbers, parameter.path if parameter.own_code else ()
    ):
        if parameter.value is None:
            raise ValueError(
                f"freeze takes layers whose weight is their parameter {KERNEL!r}, as "
                f"in nn.Dense; {layer!r} has none. In models of "
                "fbq_jax.integrations.qwix.quantize, layers that multiply in their "
                "own code may have any parameter"
            )
        if WEIGHT not in variable.value:
            check_recipe(config.recipe, layer)
            is_shared = layer in recorder.shared
            state: Mapping[str, Any] = state_of(variable)
            if is_shared:  # Flax shares what does not depend on the state of a step.
                state = threshold.start(config.recipe)
            weight = quantize_weight(config, state, rhs, dimension_numbers)
            shape = jax.tree.leaves(parameter.value)[0].shape  # it may be boxed
            name = parameter.name_in(module)
            weight = dataclasses.replace(weight, shape=shape, parameter=name)
            if is_shared:
                module.put_variable("params", variable.name, {WEIGHT: weight})
            in_state = SharedWeight() if is_shared else weight
            variable.value = {**variable.value, WEIGHT: in_state}
        stored = _stored_weight(module, variable)
        assert stored is not None
        return stored.codes
    stored = _stored_weight(module, variable)
    _check_pair(layer, parameter, variable, stored)
    if stored is None:
        return None
    if module.is_mutable_collection(variable.collection):
        raise ValueError(
            f"layer {layer!r} is frozen and does not train: call apply without "
            f"mutable=[{variable.collection!r}], or train with the variables from "
            "before freeze"
        )
    if stored.recipe != config.recipe:
        raise ValueError(
            f"layer {layer!r} was frozen with {describe_recipe(stored.recipe)}, and "
            f"its model has {describe_recipe(config.recipe)}: use the recipe that it "
            "was trained with"
        )
    if stored.parameter != (name := parameter.name_in(module)):
        raise ValueError(
            f"layer {layer!r} has the codes of {stored.parameter!r}, but multiplies by "
            f"{name!r}: call the methods that freeze was given"
        )
    check_axes(stored.axes, dimension_numbers, layer)
    return stored.codes


def _has_params(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, as a tied head may not have."""
    return bool(module.variables.get("params"))


def is_frozen(state: Mapping[str, Any]) -> bool:
    """Whether a layer is frozen, or ``freeze`` is tracing its model."""
    return WEIGHT in state or active_recorder() is not None


def _stored_weight(module: nn.Module, variable: Variable) -> FrozenWeight | None:
    """The weight of a frozen layer; None if there is none."""
    weight = variable.value.get(WEIGHT)
    if isinstance(weight, SharedWeight):
        shared: Any = module.get_variable("params", variable.name)
        weight = shared and shared[WEIGHT]
    return weight


def _check_pair(
    layer: str, parameter: Parameter, variable: Variable, weight: FrozenWeight | None
) -> None:
    """Raises ValueError unless both are frozen or both are not."""
    stand_in = isinstance(parameter.value, FrozenKernel)
    stored = variable.value.get(WEIGHT)
    if stand_in and weight is None:
        collection = "params" if stored else variable.collection
        raise ValueError(
            f"layer {layer!r} is frozen, but has no codes in the collection "
            f"{collection!r}: pass apply all collections that freeze returned"
        )
    if stored and not stand_in and not (weight and weight.kept):
        raise ValueError(
            f"layer {layer!r} has both the codes of a frozen weight and an unquantized "
            "kernel: pass apply either all collections that freeze returned, or all "
            "from before"
        )
