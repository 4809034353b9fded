"""``freeze`` for Flax Linen: INT8 weights with the results of the trained model.

The codes of a weight depend on the dtype that a layer computes in and on the axes that
it contracts, and the variables show neither.  ``freeze`` therefore runs the model, and
each layer quantizes its right operand (``fbq_jax.linen.frozen``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    WeightRecorder,
    as_array,
    check_thetas,
    record_weights,
)
from fbq_jax.core.layer_stats import is_state, layer_path
from fbq_jax.core.serialization import serializable_static
from fbq_jax.core.weight_products import ParameterUse, check_weight, split_arrays
from fbq_jax.linen.frozen import KERNEL, WEIGHT, FrozenParameter, SharedWeight
from fbq_jax.linen.state import calling_module
from fbq_jax.linen.tracing import ALL_STATE, trace_uses
from fbq_jax.model_kind import check_linen

Path = tuple[str, ...]


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

    In a model of ``fbq_jax.integrations.qwix.quantize``, it also freezes layers that
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

    @jax.jit
    def quantize(variables: dict[str, Any]) -> Any:
        # Weights that are shared go to the parameters.
        mutable = True if recorder.shared else ALL_STATE
        return model.apply(variables, *args, mutable=mutable, **kwargs)[1]

    layers, inputs = [_layer(path) for path in states], unflatten_dict(leaves)
    with record_weights(layers) as recorder:
        updates = _flatten(jax.eval_shape(quantize, inputs))
        recorder.check_all_ran()
        if not (shared := _shared_layers(updates, leaves, recorder)):
            updates = _flatten(quantize(inputs))
    if shared:
        with record_weights(layers, shared) as recorder:
            updates = _flatten(quantize(inputs))
    # Products of two activations have no weight.
    states = {path: s for path, s in states.items() if _layer(path) in recorder.uses}
    if not states:
        raise ValueError(
            "freeze found no layer with a weight: all quantized products of this model "
            "are of two activations"
        )
    weights = {
        path: updates[_with_parameters(path)]
        if _layer(path) in shared
        else updates[path][WEIGHT]
        for path in states
    }
    thetas = {_layer(p): (w.recipe, states[p]["theta"]) for p, w in weights.items()}
    check_thetas(thetas)
    own_code = {
        path: ("params", *use.parameter)
        for path in states
        if (use := recorder.uses[_layer(path)]) is not None and use.parameter
    }
    if missing := sorted("/".join(p[1:]) for p in own_code.values() if p not in leaves):
        raise ValueError(
            f"the model's code multiplies by {missing}, which are no parameters of the "
            "model itself: it calls apply on a module inside. Give that module None in "
            "the rules"
        )
    # A frozen layer does not train.
    evaluation = DenyList(("params", *{collection for collection, *_ in states}))
    evaluated = {**kwargs, "mutable": evaluation}
    uses = _uses(model, unflatten_dict(leaves), args, evaluated)
    borrowed = {
        path
        for path, use in uses.items()
        if any(product.layer in recorder.borrowing for product in use.quantized)
    }
    kept = {path for path, use in uses.items() if use.other_readers}
    frozen = dict(leaves)
    for path, weight in weights.items():
        parameter = own_code.get(path, _kernel(path))
        name = "/".join(parameter[1:])
        if path not in own_code and name in borrowed:
            raise ValueError(
                f"{sorted(recorder.borrowing)} multiply by {name!r} of another layer, "
                "which freeze would remove: give them None in the rules"
            )
        check_weight(_layer(path), name, uses[name], kept=path in own_code)
        if path in own_code and name in kept | borrowed:
            weight = replace(weight, kept=True)
        else:
            array = jax.tree.leaves(leaves[parameter])[0]  # the parameter may be boxed
            stand_in = FrozenParameter if path in own_code else _LinenKernel
            frozen[parameter] = stand_in(weight.shape, jnp.dtype(array.dtype))
        if _layer(path) in shared:
            frozen[_with_parameters(path)] = weight
            weight = SharedWeight()
        frozen[path] = {**states[path], WEIGHT: weight}
    result = unflatten_dict(frozen)
    _check_runs(model, result, args, evaluated)
    return result


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
    updates: Mapping[Path, Any], leaves: Mapping[Path, Any], recorder: WeightRecorder
) -> set[str]:
    """The layers whose weight would be stored once for each step that shares it.

    Their states have more axes of steps, or of examples, than their parameters.  Codes
    that depend on the seed of a step are not shared.
    """
    shared = set()
    for path, state in updates.items():
        use = recorder.uses.get(_layer(path)) if is_state(state) else None
        if use is None or WEIGHT not in state:
            continue
        weight = state[WEIGHT]
        parameter = ("params", *use.parameter) if use.parameter else _kernel(path)
        arrays = jax.tree.leaves(leaves.get(parameter))  # the parameter may be boxed
        matrices = weight.codes.main.codes.ndim - 3
        if weight.recipe.fwd.rhs != "stochastic" and any(
            matrices > array.ndim - len(weight.shape) for array in arrays
        ):
            shared.add(_layer(path))
    return shared


def _with_parameters(state: Path) -> Path:
    """The path of the weight of steps that share it, next to their parameters."""
    return ("params", *state[1:], WEIGHT)


def _kernel(state: Path) -> Path:
    """The path of the kernel of the layer whose state is at a path."""
    return ("params", *state[1:-1], KERNEL)


def _layer(state: Path) -> str:
    """The name of the layer whose state is at a path."""
    return layer_path(state[1:])


def _uses(
    model: nn.Module,
    variables: Mapping[str, Any],
    args: Any,
    kwargs: Any,
) -> dict[str, ParameterUse]:
    """Maps the path of each parameter to its use."""
    arrays, rebuild = split_arrays((args, kwargs))

    def apply(variables: Mapping[str, Any], arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        return model.apply(variables, *args, **kwargs)

    return {path: use for path, _, use in trace_uses(apply, variables, arrays)}


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


def _check_runs(
    model: nn.Module, frozen: dict[str, Any], args: Any, kwargs: Any
) -> None:
    """Raises ValueError if the frozen model cannot run."""
    try:
        jax.eval_shape(lambda: model.apply(frozen, *args, **kwargs))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            "the frozen model does not run: a layer reads its kernel other than by "
            "multiplying by it with its FallbackDot"
        ) from error
