"""``freeze`` for Flax NNX: INT8 weights with the results of the trained model."""

from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fbq_jax.core.freezing import check_runs, find_kept_parameters
from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    as_array,
    check_recipe,
    check_thetas,
)
from fbq_jax.core.threshold import layer_path
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.dot import (
    FallbackDot,
    FrozenCodes,
    Layer,
    dot_name,
    dot_of,
    is_activations_dot,
    layer_op,
)
from fbq_jax.nnx.sharing import check_unshared
from fbq_jax.nnx.tracing import (
    MakingCodes,
    make_weights,
    name_ops,
    parameter_paths,
    split_model,
    trace_call,
)

M = TypeVar("M", bound=nnx.Module)


def freeze(model: M, *args: Any, **kwargs: Any) -> M:
    """Turns the weights of a model's quantized layers into INT8 codes and scales.

    ``fbq_jax.freeze`` for NNX.  It freezes ``nnx.Linear`` and ``nnx.LinearGeneral``
    layers (also inside attention) with a ``fbq_jax.nnx.FallbackDot``, ``nnx.Einsum``
    with a ``fbq_jax.nnx.FallbackEinsum``, ``nnx.Conv`` with a
    ``fbq_jax.nnx.FallbackConv`` and the projections of ``fbq_jax.nnx.MoEMLP``.  They
    lose their kernel.  Codes and scales are the variable ``dot_general.weight``, inside
    the ``einsum_op`` of an einsum and the ``conv_general_dilated`` of a convolution.

    In a model of ``fbq_jax.contrib.qwix.quantize_nnx``, it also freezes modules
    that multiply by a parameter in their own code.  They keep a parameter that is read
    other than by this product, as a tied head does.  Products of two activations, which
    have no weight, stay quantized.

    To get the abstract model that restoring a checkpoint needs, call
    ``nnx.eval_shape(lambda: freeze(Model(rngs=nnx.Rngs(0)), x))``.

    Args:
      model: the trained model; it does not change.
      *args: the arguments of a call that runs every layer; arrays may be
        ``jax.ShapeDtypeStruct``.
      **kwargs: keyword arguments of the same call.

    Returns:
      A model of the same class, in evaluation.

    Raises:
      TypeError: the model is not one of NNX, or its state was passed, too.
      ValueError: no layer has a ``FallbackDot``, or two layers share one; or a layer is
        frozen already, has no threshold yet, has a recipe with an unquantized forward
        pass, does not run, multiplies by its kernel in two ways (an einsum that is
        called with other subscripts), has another class than these, is a
        convolution with a mask, or has a kernel that something else reads.

    >>> import jax.numpy as jnp
    >>> from fbq_jax.nnx import FallbackDot
    >>> x = jax.random.normal(jax.random.key(0), (2, 8))
    >>> layer = nnx.Linear(8, 4, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> _ = layer(x)  # trains
    >>> frozen = freeze(layer, x)
    >>> layer.eval()
    >>> bool(jnp.all(frozen(x) == layer(x)))
    True
    """
    check_nnx("freeze", model)
    check_unshared(model)
    if args and isinstance(args[0], nnx.State):
        raise TypeError(
            "fbq_jax.nnx.freeze takes the arguments of a call of the model, which "
            "holds its state: freeze(model, x); got an nnx.State first"
        )
    model = nnx.clone(model)
    model.eval()
    layers = _find_layers(model)
    args, kwargs = jax.tree.map(as_array, (args, kwargs))
    making = MakingCodes(layers)
    weights = make_weights(nnx.clone(model), making, args, kwargs)
    making.check_all_ran()
    own_code = {p for p, w in layers.items() if not isinstance(w.layer, Layer)}
    names = {path: weight.parameter for path, weight in layers.items()}
    call, others = split_model(name_ops(model))
    values = {name: others.pop(name) for name in set(names.values())}
    kept = find_kept_parameters(
        lambda values, others, inputs: call({**others, **values}, *inputs),
        names,
        own_code,
        values,
        others,
        (args, kwargs),
    )
    for path, weight in layers.items():
        weight.dot.weight = nnx.data(FrozenCodes(weights[path]))
        weight.dot.step_codes = nnx.static(None)  # of a weight that it loses
        weight.dot.axes = making.made[path][0]
        value = getattr(weight.layer, weight.name)
        if weight.parameter not in kept and isinstance(value, nnx.Param):
            axes = 0 if path in own_code else len(weight.dot.theta.shape)
            kernel: Any = FrozenKernel(value.shape[axes:], value.dtype)
            kernel = nnx.Param(kernel) if path in own_code else kernel
            setattr(weight.layer, weight.name, kernel)
    check_runs(lambda: trace_call(model, args, kwargs))
    return model


class _Weight(NamedTuple):
    """The parameter of a module, its path, and the op that multiplies by it."""

    layer: nnx.Module
    name: str
    parameter: str
    dot: FallbackDot


def _find_layers(model: nnx.Module) -> dict[str, _Weight]:
    """Maps path to weight; each dot learns the path of its layer."""
    modules, parameters = dict(nnx.iter_modules(model)), parameter_paths(model)
    layers: dict[str, _Weight] = {}
    for path, layer in modules.items():
        ops = {
            name: (getattr(layer, dot_name(name), None), (*path, name))
            for name, value in vars(layer).items()
            if isinstance(value, nnx.Param)
        }
        if isinstance(layer, Layer):
            ops["kernel"] = dot_of(getattr(layer, layer_op(layer).name)), path
        for name, (dot, place) in ops.items():
            if isinstance(dot, FallbackDot):
                dot.layer = layer_path(place)
                _check_layer(dot.layer, layer, dot)
                parameter = parameters[id(getattr(layer, name))]
                layers[dot.layer] = _Weight(layer, name, parameter, dot)
    for path, module in modules.items():
        if isinstance(module, FallbackDot) and module.layer is None:
            if path and is_activations_dot(str(path[-1])):
                continue
            outer = (modules.get(path[:end]) for end in reversed(range(len(path))))
            owner = next((type(m).__name__ for m in outer if m is not None), "model")
            raise ValueError(
                "freeze takes nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv and "
                "MoEMLP; it cannot freeze the FallbackDot "
                f"{'/'.join(map(str, path))!r} of a {owner}"
            )
    if not layers:
        raise ValueError("freeze found no layer that multiplies by a FallbackDot")
    check_thetas({p: (w.dot.recipe, w.dot.theta[...]) for p, w in layers.items()})
    return layers


def unknown_weight(layer: Layer) -> str | None:
    """Why nobody can tell what a layer multiplies by; None if it is its kernel."""
    if not type(layer).__call__.__module__.startswith(("flax.", "fbq_jax.")):
        return f"its class {type(layer).__name__} has a __call__ of its own"
    if getattr(layer, "promote_dtype", promote_dtype) is not promote_dtype:
        return "its promote_dtype is not Flax's"
    return None


def _check_layer(path: str, layer: nnx.Module, dot: FallbackDot) -> None:
    if isinstance(layer, Layer) and (reason := unknown_weight(layer)) is not None:
        raise ValueError(
            f"freeze cannot tell what the layer {path!r} multiplies by: {reason}. "
            "Give it None in the rules"
        )
    if isinstance(layer, nnx.Conv) and layer.mask is not None:
        raise ValueError(f"freeze takes no nnx.Conv with a mask, as {path!r} has")
    if dot.weight is not None:
        raise ValueError(f"freeze takes a model once; {path!r} is frozen already")
    check_recipe(dot.recipe, path)
