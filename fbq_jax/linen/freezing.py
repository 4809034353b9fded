"""``freeze`` for Flax Linen: INT8 weights with the results of the trained model.

The codes of a weight depend on the dtype that a layer computes in and on the axes that
it contracts, and the variables show neither.  ``freeze`` therefore runs the model, and
each layer gives its right operand to a visitor, which quantizes it.  It then asks JAX
whether that operand depends on the model's inputs, and whether anything else reads the
parameter (``fbq_jax.core.tracing``).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import DenyList, unfreeze
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict

from fbq_jax.core import threshold
from fbq_jax.core.freezing import check_runs, find_kept_parameters
from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    FrozenWeight,
    Making,
    as_array,
    check_axes,
    check_recipe,
    check_thetas,
    differ,
    quantize_weight,
)
from fbq_jax.core.layer_stats import is_state
from fbq_jax.core.serialization import serializable_static
from fbq_jax.core.threshold import layer_path
from fbq_jax.core.visitors import FoundCodes, visiting
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.linen.frozen import FrozenParameter, SharedWeight
from fbq_jax.linen.state import KERNEL, WEIGHT, LayerWeight, calling_module, state_of
from fbq_jax.linen.tracing import ALL_STATE
from fbq_jax.model_kind import check_linen

Path = tuple[str, ...]
# The key of what says whether a layer multiplied by several weights.
_DIFFERS = "weight_differs"


def freeze(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Turns the weights of a model's quantized layers into INT8 codes and scales.

    The same model, applied to the returned variables, computes bit for bit what it
    computes from ``variables`` in evaluation.  It freezes the layers that
    multiply by their parameter ``kernel`` with a ``FallbackDot``: Flax's ``Dense``,
    ``DenseGeneral`` and attention, ``Einsum``, ``Conv``, ``NormDense``, ``GatedMLP``
    and ``MoEMLP``.  Other parameters do not change, and products of two activations
    stay quantized.

    In a model of ``fbq_jax.contrib.qwix.quantize``, it also freezes layers that
    multiply by a parameter in their own code.  A parameter that is read other than by
    quantized products, as a tied head is, stays next to its codes.  A head that the
    model's code calls by ``head.apply`` with the embedding's weight stays as it is.

    In the returned tree, the kernel of a frozen layer is a ``FrozenKernel`` without
    leaves, and the layer's state has a ``FrozenWeight`` with the codes.  If steps of an
    ``nn.scan``, or examples of an ``nn.vmap``, share the kernel and have a state each,
    ``params`` has the codes, once, next to the kernel.  To get the abstract tree that
    restoring a checkpoint needs, call
    ``jax.eval_shape(lambda: freeze(model, model.init(key, x), x))``.

    Args:
      model: the trained model.
      variables: its parameters and the collection with the state of its layers.
      *args: the arguments of ``model.apply`` for an evaluation that runs every layer;
        arrays may be ``jax.ShapeDtypeStruct``.
      **kwargs: keyword arguments of the same call, such as ``method`` and ``rngs``.
        All collections may be updated, as by attention with ``decode=True``, whatever
        ``mutable`` is, and the updates are dropped.

    Returns:
      The variables of the frozen model.

    Raises:
      TypeError: the model is not one of Linen, or ``variables`` is no mapping.
      ValueError: no layer multiplies by a ``FallbackDot``; or a layer is frozen
        already, has no threshold yet, has a recipe with an unquantized forward pass,
        does not run, has no kernel, reads it other than through its dot, or multiplies
        by it in two ways (an ``Einsum`` that is called with other subscripts).

    >>> from fbq_jax import fallback_dot
    >>> layer = nn.Dense(4, dot_general=fallback_dot)
    >>> x = jax.random.normal(jax.random.key(0), (2, 8))
    >>> variables = layer.init(jax.random.key(1), x)
    >>> _, state = layer.apply(variables, x, mutable=["fallback"])  # trains
    >>> variables = {**variables, **state}
    >>> frozen = freeze(layer, variables, x)
    >>> bool(jnp.all(layer.apply(frozen, x) == layer.apply(variables, x)))
    True
    >>> frozen["fallback"]["dot_general"]["weight"].codes.mT.shape
    (1, 8, 4)
    """
    check_linen("freeze", model)
    if not isinstance(variables, Mapping):
        raise TypeError(
            "freeze takes the model's variables after the model, such as {'params': "
            f"..., 'fallback': ...}}; got {type(variables).__name__}"
        )
    leaves = _flatten(variables)
    states = {path: value for path, value in leaves.items() if is_state(value)}
    _check_states(states, leaves)
    kwargs = {name: value for name, value in kwargs.items() if name != "mutable"}
    args, kwargs = jax.tree.map(as_array, (args, kwargs))
    layers = [_layer(path) for path in states]
    making, updates = _make_codes(model, leaves, layers, args, kwargs)
    # Products of two activations, and with other modules' parameters, have no weight.
    states = {path: s for path, s in states.items() if _layer(path) in making.made}
    if not states:
        raise ValueError(
            "freeze found no layer with a weight: all quantized products of this model "
            "are of two activations"
        )
    weights = {path: _weight(path, updates, making) for path in states}
    thetas = {_layer(p): (w.recipe, states[p]["theta"]) for p, w in weights.items()}
    check_thetas(thetas)
    parameters = {_layer(path): _parameter_of(path, making, leaves) for path in states}
    # A frozen layer does not train.
    evaluation = DenyList(("params", *{collection for collection, *_ in states}))
    evaluated = {**kwargs, "mutable": evaluation}
    own_code = {layer for layer, (_, x) in making.made.items() if x.own_code}
    kept = _find_kept(model, leaves, parameters, own_code, args, evaluated)
    frozen = dict(leaves)
    for path, weight in weights.items():
        layer = _layer(path)
        parameter = parameters[layer]
        if parameter in kept:
            weight = replace(weight, kept=True)
        else:
            array = jax.tree.leaves(leaves[parameter])[0]  # the parameter may be boxed
            stand_in = FrozenParameter if layer in own_code else _LinenKernel
            frozen[parameter] = stand_in(weight.shape, jnp.dtype(array.dtype))
        in_state: FrozenWeight | SharedWeight = weight
        if layer in making.shared:
            frozen[_with_parameters(path)] = weight
            in_state = SharedWeight()
        frozen[path] = {**states[path], WEIGHT: in_state}
    result = unflatten_dict(frozen)
    check_runs(lambda: model.apply(result, *args, **evaluated))
    return result


@dataclass(eq=False)
class _Freezing(Making):
    """The visitor of ``freeze``: layers store the codes of their weights.

    Attributes:
      shared: the paths of layers whose steps or examples share their weight.
    """

    shared: Collection[str] = field(default=(), kw_only=True)
    freezes = True

    def codes(self, product: Any) -> FoundCodes | None:
        """Stores the codes of a layer to freeze; the product multiplies by them.

        A layer that a model applies to the weight of another module, as it may a head
        that shares the embedding's, stays unfrozen: that module keeps the weight.
        """
        if not isinstance(product, LayerWeight):
            return None
        layer, parameter, module = product.layer, product.parameter, product.module
        if parameter is None or (
            parameter.value is None and not module.variables.get("params")
        ):
            self.left.add(layer)
            return None
        if layer not in (self.layers or ()):
            return None
        if parameter.value is None:
            raise ValueError(
                f"freeze takes layers whose weight is their parameter {KERNEL!r}, as "
                f"in nn.Dense; {layer!r} has none. In models of "
                "fbq_jax.contrib.qwix.quantize, layers that multiply in their own code "
                "may have any parameter"
            )
        check_recipe(product.config.recipe, layer)
        self.add(layer, product.dimension_numbers, parameter._replace(value=None))
        weight = self._store(product)
        check_axes(weight.axes, product.dimension_numbers, layer)
        return Layouts(None, weight.codes), True

    def _store(self, product: LayerWeight) -> FrozenWeight:
        """Stores the codes of a weight, if there are none; returns those stored."""
        variable, module, config = product.variable, product.module, product.config
        is_shared = product.layer in self.shared
        state: Mapping[str, Any] = state_of(variable)
        if is_shared:  # Flax shares what does not depend on the state of a step.
            state = threshold.start(config.recipe)
        weight = quantize_weight(
            config, state, product.operand(), product.dimension_numbers
        )
        assert product.parameter is not None
        shape = jax.tree.leaves(product.parameter.value)[0].shape  # it may be boxed
        weight = replace(weight, shape=shape, parameter=product.parameter_name)
        if (earlier := _stored(product)) is not None:
            differs = variable.value.get(_DIFFERS, False) | differ(earlier, weight)
            variable.value = {**variable.value, _DIFFERS: differs}
            return earlier
        if is_shared:
            module.put_variable("params", variable.name, {WEIGHT: weight})
        in_state = SharedWeight() if is_shared else weight
        variable.value = {**variable.value, WEIGHT: in_state}
        return weight


def _stored(product: LayerWeight) -> FrozenWeight | None:
    """The weight that a layer has stored before."""
    weight: Any = product.variable.value.get(WEIGHT)
    if isinstance(weight, SharedWeight):
        shared: Any = product.module.get_variable("params", product.variable.name)
        weight = shared and shared[WEIGHT]
    return weight


def _make_codes(
    model: nn.Module,
    leaves: Mapping[Path, Any],
    layers: list[str],
    args: Any,
    kwargs: Mapping[str, Any],
) -> tuple["_Freezing", dict[Path, Any]]:
    """Runs a model whose layers make codes; returns what they made, and the updates."""

    @jax.jit
    def run(variables: dict[str, Any]) -> Any:
        # Weights that are shared go to the parameters.
        mutable = True if making.shared else ALL_STATE
        return model.apply(variables, *args, mutable=mutable, **kwargs)[1]

    making, inputs = _Freezing(layers), unflatten_dict(leaves)
    with visiting(making):
        updates = _flatten(jax.eval_shape(run, inputs))
        making.check_all_ran()
        if not (shared := _shared_layers(updates, leaves, making)):
            return making, _flatten(run(inputs))
    making = _Freezing(layers, shared=shared)
    with visiting(making):
        return making, _flatten(run(inputs))


def _weight(path: Path, updates: Mapping[Path, Any], making: _Freezing) -> FrozenWeight:
    """The weight of the layer whose state is at a path."""
    differs = updates[path].get(_DIFFERS, False)
    if not isinstance(differs, jax.core.Tracer) and np.any(differs):
        raise ValueError(
            f"layer {_layer(path)!r} multiplies by several weights with one state: "
            "freeze takes layers that multiply by one parameter, in one way"
        )
    is_shared = _layer(path) in making.shared
    weight: FrozenWeight = (
        updates[_with_parameters(path)] if is_shared else updates[path][WEIGHT]
    )
    return weight


def _parameter_of(path: Path, making: _Freezing, leaves: Mapping[Path, Any]) -> Path:
    """The path of the parameter of the layer whose state is at a path."""
    parameter = making.made[_layer(path)][1]
    if (found := ("params", *parameter.path)) not in leaves:
        raise ValueError(
            f"the model's code multiplies by {'/'.join(parameter.path)!r}, which is no "
            "parameter of the model itself: it calls apply on a module inside. Give "
            "that module None in the rules"
        )
    return found


def _find_kept(
    model: nn.Module,
    leaves: Mapping[Path, Any],
    parameters: Mapping[str, Path],
    own_code: Collection[str],
    args: Any,
    kwargs: Mapping[str, Any],
) -> set[Path]:
    """The parameters that stay beside their codes (``find_kept_parameters``)."""
    names = {layer: "/".join(path[1:]) for layer, path in parameters.items()}
    paths = {names[layer]: path for layer, path in parameters.items()}
    # Flax knows an empty node by its identity, which JAX does not keep.
    others = {path: x for path, x in leaves.items() if x is not empty_node}
    values = {name: others.pop(path) for name, path in paths.items()}

    def call(values: dict[str, Any], others: Any, inputs: Any) -> Any:
        args, kwargs = inputs
        named = {paths[name]: value for name, value in values.items()}
        return model.apply(unflatten_dict({**others, **named}), *args, **kwargs)

    inputs = args, kwargs
    kept = find_kept_parameters(call, names, own_code, values, others, inputs)
    return {paths[name] for name in kept}


@serializable_static
@dataclass(frozen=True)
class _LinenKernel(FrozenKernel):
    """A ``FrozenKernel`` that refuses layers without a quantized op."""

    def __jax_array__(self) -> jax.Array:
        module = calling_module()
        if module is not None and any(
            getattr(module, op, self) is None
            and getattr(module, f"{op}_cls", None) is None
            for op in ("dot_general", "conv_general_dilated")
        ):
            raise ValueError(
                f"layer {layer_path(module.path)!r} is frozen to INT8 codes, but this "
                "model leaves it unquantized: use the model that was trained"
            )
        return super().__jax_array__()


def _flatten(variables: Mapping[str, Any]) -> dict[Path, Any]:
    """A mapping from path to value; the state of a layer is one value."""
    return flatten_dict(
        unfreeze(dict(variables)),
        keep_empty_nodes=True,
        is_leaf=lambda _, value: is_state(value),
    )


def _shared_layers(
    updates: Mapping[Path, Any], leaves: Mapping[Path, Any], making: _Freezing
) -> set[str]:
    """The layers whose weight would be stored once for each step that shares it.

    Their states have more axes of steps, or of examples, than their parameters.  Codes
    that depend on the seed of a step are not shared.
    """
    shared = set()
    for path, state in updates.items():
        if not is_state(state) or WEIGHT not in state:
            continue
        weight, (_, parameter) = state[WEIGHT], making.made[_layer(path)]
        # The parameter may be boxed.
        arrays = jax.tree.leaves(leaves.get(("params", *parameter.path)))
        matrices = weight.codes.main.codes.ndim - 3
        if weight.recipe.fwd.rhs != "stochastic" and any(
            matrices > array.ndim - len(weight.shape) for array in arrays
        ):
            shared.add(_layer(path))
    return shared


def _with_parameters(state: Path) -> Path:
    """The path of the weight of steps that share it, next to their parameters."""
    return ("params", *state[1:], WEIGHT)


def _layer(state: Path) -> str:
    """The name of the layer whose state is at a path."""
    return layer_path(state[1:])


def _check_states(states: Mapping[Path, Any], leaves: Mapping[Path, Any]) -> None:
    if not states:
        raise ValueError(
            "freeze found no state of a FallbackDot in the collections "
            f"{sorted({path[0] for path in leaves})}: pass params and state together "
            "({'params': ..., 'fallback': ...}); a model trained without state takes "
            "the collection that its init returns, and one without quantized layers "
            "has nothing to freeze"
        )
    if again := [_layer(path) for path, state in states.items() if WEIGHT in state]:
        raise ValueError(
            "freeze takes a model once; these layers are already frozen: "
            f"{', '.join(again)}"
        )
