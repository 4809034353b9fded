"""The codes of a Linen layer's weight, which its variables may have.

``freeze`` stores them in the variable with the layer's state, which lifted
transformations such as ``nn.scan`` carry already.  Where these have a state for each
step, or example, but share the parameters, the codes are with the parameters.  The
codes of a training step are in a collection of their own.
"""

import dataclasses
from collections.abc import Callable, Mapping
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
    Making,
    StepWeight,
    active_making,
    check_axes,
    check_recipe,
    differ,
    has_constant_codes,
    is_freezing,
    quantize_step_weight,
    quantize_weight,
    quantizes_weights,
)
from fbq_jax.core.serialization import serializable_static
from fbq_jax.core.threshold import layer_path
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.linen.state import state_of
from fbq_jax.linen.tracing import KERNEL
from fbq_jax.recipes.presets import describe_recipe

#: The key of the ``FrozenWeight`` in the state of a layer.
WEIGHT = "weight"
#: The key of what says whether a layer multiplied by several weights, in ``freeze``.
DIFFERS = "weight_differs"


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
class SharedWeight:
    """Stands in for a ``FrozenWeight`` in states of steps that share it."""


def kernel_of(module: nn.Module) -> Parameter:
    """The kernel of a layer."""
    assert module.scope is not None
    kernel = module.scope.get_variable("params", KERNEL)
    return Parameter((*module.path, KERNEL), kernel)


def codes_collection(collection: str) -> str:
    """The collection of codes, of layers that keep their state in ``collection``."""
    return f"{collection}_codes"


def is_frozen(state: Mapping[str, Any]) -> bool:
    """Whether a layer is frozen, or ``freeze`` is running its model."""
    return WEIGHT in state or is_freezing()


@dataclasses.dataclass(frozen=True)
class LayerWeight:
    """The weight of a Linen layer.

    Attributes:
      config: the recipe and the implementation of the layer's dot.
      module: the layer.
      variable: holds the layer's state.
      make: makes the right operand of the product.
      dimension_numbers: of the product.
      parameter: the parameter that the right operand is made from.
    """

    config: DotConfig
    module: nn.Module
    variable: Variable
    make: Callable[[], jax.Array]
    dimension_numbers: DimensionNumbers
    parameter: Parameter

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return layer_path((*self.module.path, self.variable.name))

    def codes(self) -> tuple[Layouts | None, bool]:
        """The codes of the weight, and whether the layer is frozen.

        There are none in a layer that quantizes its weight itself.  While the model
        runs inside ``make_codes``, the layer makes them.

        Raises:
          ValueError: parameters and state do not belong together; the layer is frozen
            and trains, or has another recipe or product than before; codes of a step
            are of another weight or product, or cannot be stored; or ``freeze`` finds
            no kernel.
        """
        making, freezes = active_making(), is_freezing()
        if making is not None and freezes:
            self._freeze(making)
        frozen = self._stored()
        if not freezes:
            self._check_pair(frozen)
        if frozen is not None:
            if not freezes:
                self._check_serves(frozen)
            check_axes(frozen.axes, self.dimension_numbers, self.layer)
            return Layouts(None, frozen.codes), True
        # NNX names layers, and a Linen layer inside such a model is none of them.
        if making is not None and not freezes and making.layers is None:
            return self._make_for_step(making), False
        name, collection = self.variable.name, self._collection
        if not self.module.has_variable(collection, name):
            return None, False
        weight: StepWeight = self.module.get_variable(collection, name)
        return weight.codes_for(self.layer, self.make, self.dimension_numbers), False

    @property
    def _collection(self) -> str:
        return codes_collection(self.variable.collection)

    def _make_for_step(self, making: Making) -> Layouts | None:
        """The codes that a step's microbatches share, which the layer stores."""
        recipe, module, collection = self.config.recipe, self.module, self._collection
        if not quantizes_weights(recipe):
            return None
        library = type(module).__module__.split(".")[0]
        # Nobody knows what other modules make of their kernel, or of an activation.
        is_kernel = library in ("flax", "fbq_jax") and module.has_variable(
            "params", KERNEL
        )
        if not has_constant_codes(recipe) or not is_kernel:
            making.left.add(self.layer)
            return None
        if not module.is_mutable_collection(collection):
            raise ValueError(
                f"layer {self.layer!r} cannot store codes in the collection "
                f"{collection!r}: if the layer is inside nn.scan or nn.vmap, list it "
                "beside 'params', in variable_axes or variable_broadcast"
            )
        weight = quantize_step_weight(self.config, self.make(), self.dimension_numbers)
        module.put_variable(collection, self.variable.name, weight)
        making.made[self.layer] = weight.axes, collection
        return weight.codes

    def _freeze(self, making: Making) -> None:
        """Stores the codes that ``freeze`` asks for.

        A layer that a model applies to the weight of another module, as it may a head
        that shares the embedding's, stays unfrozen: that module keeps the weight.
        """
        layer, parameter, variable = self.layer, self.parameter, self.variable
        if parameter.value is None and not self.module.variables.get("params"):
            making.left.add(layer)
            return
        if layer not in (making.layers or ()):
            return
        if parameter.value is None:
            raise ValueError(
                f"freeze takes layers whose weight is their parameter {KERNEL!r}, as "
                f"in nn.Dense; {layer!r} has none. In models of "
                "fbq_jax.contrib.qwix.quantize, layers that multiply in their "
                "own code may have any parameter"
            )
        check_recipe(self.config.recipe, layer)
        making.add(layer, self.dimension_numbers, parameter._replace(value=None))
        is_shared = layer in making.shared
        state: Mapping[str, Any] = state_of(variable)
        if is_shared:  # Flax shares what does not depend on the state of a step.
            state = threshold.start(self.config.recipe)
        weight = quantize_weight(
            self.config, state, self.make(), self.dimension_numbers
        )
        shape = jax.tree.leaves(parameter.value)[0].shape  # it may be boxed
        name = parameter.name_in(self.module)
        weight = dataclasses.replace(weight, shape=shape, parameter=name)
        if (earlier := self._stored()) is not None:
            differs = variable.value.get(DIFFERS, False) | differ(earlier, weight)
            variable.value = {**variable.value, DIFFERS: differs}
            return
        if is_shared:
            self.module.put_variable("params", variable.name, {WEIGHT: weight})
        in_state = SharedWeight() if is_shared else weight
        variable.value = {**variable.value, WEIGHT: in_state}

    def _stored(self) -> FrozenWeight | None:
        """The weight of a frozen layer; None if there is none."""
        weight = self.variable.value.get(WEIGHT)
        if isinstance(weight, SharedWeight):
            shared: Any = self.module.get_variable("params", self.variable.name)
            weight = shared and shared[WEIGHT]
        return weight

    def _check_serves(self, weight: FrozenWeight) -> None:
        """Raises ValueError unless a frozen layer serves the weight it was made for."""
        layer, collection = self.layer, self.variable.collection
        if self.module.is_mutable_collection(collection):
            raise ValueError(
                f"layer {layer!r} is frozen and does not train: call apply without "
                f"mutable=[{collection!r}], or train with the variables from before "
                "freeze"
            )
        if weight.recipe != self.config.recipe:
            raise ValueError(
                f"layer {layer!r} was frozen with {describe_recipe(weight.recipe)}, "
                f"and its model has {describe_recipe(self.config.recipe)}: use the "
                "recipe that it was trained with"
            )
        if weight.parameter != (name := self.parameter.name_in(self.module)):
            raise ValueError(
                f"layer {layer!r} has the codes of {weight.parameter!r}, but "
                f"multiplies by {name!r}: call the methods that freeze was given"
            )

    def _check_pair(self, weight: FrozenWeight | None) -> None:
        """Raises ValueError unless parameter and state are both frozen, or neither."""
        stand_in = isinstance(self.parameter.value, FrozenKernel)
        stored = self.variable.value.get(WEIGHT)
        if stand_in and weight is None:
            collection = "params" if stored else self.variable.collection
            raise ValueError(
                f"layer {self.layer!r} is frozen, but has no codes in the collection "
                f"{collection!r}: pass apply all collections that freeze returned"
            )
        if stored and not stand_in and not (weight and weight.kept):
            raise ValueError(
                f"layer {self.layer!r} has both the codes of a frozen weight and an "
                "unquantized kernel: pass apply either all collections that freeze "
                "returned, or all from before"
            )
