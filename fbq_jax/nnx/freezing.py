"""What is trained is what is served: ``freeze`` for Flax NNX."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from fbq_jax.core import threshold
from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    check_recipe,
    check_thetas,
    quantize_weight,
    rhs_axes,
    zeros,
)
from fbq_jax.core.qtensor import QTensor
from fbq_jax.nnx.dot import FallbackOp
from fbq_jax.nnx.frozen import Call, FreezableDot, FrozenCodes
from fbq_jax.nnx.sharing import check_unshared

M = TypeVar("M", bound=nnx.Module)

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)
TAKEN = "freeze takes nnx.Linear, nnx.LinearGeneral, nnx.Einsum and nnx.Conv"


def freeze(model: M, *args: Any, **kwargs: Any) -> M:
    """Turns the weights of a model's quantized layers into INT8 codes and scales.

    ``fbq_jax.freeze`` for NNX.  The layers are ``nnx.Linear`` and ``nnx.LinearGeneral``
    (also those of attention) that multiply by a ``fbq_jax.nnx.FallbackDot``,
    ``nnx.Einsum`` by a ``fbq_jax.nnx.FallbackEinsum`` and ``nnx.Conv`` by a
    ``fbq_jax.nnx.FallbackConv``.  They lose their kernel; codes and scales are the
    variable ``dot_general.weight``, which an einsum has in its ``einsum_op`` and a
    convolution in its ``conv_general_dilated``.

    For a model as abstract as restoring a checkpoint needs it,
    ``nnx.eval_shape(lambda: freeze(Model(rngs=nnx.Rngs(0)), x))``.

    Args:
      model: the one that was trained, which is left as it is.
      *args: what it takes for a call that runs every layer; a ``jax.ShapeDtypeStruct``
        will do for an array.
      **kwargs: likewise.

    Returns:
      A model of the same class, in evaluation.

    Raises:
      ValueError: no layer multiplies by a ``FallbackDot``, or one is frozen already,
        has no threshold yet, has a recipe that multiplies in floats in the forward
        pass, does not run, or multiplies by its kernel in two ways (an einsum called
        with subscripts of its own); something else than these layers does; a
        convolution has a mask; or two of them share one ``FallbackDot``.

    >>> import jax.numpy as jnp
    >>> from fbq_jax.nnx import FallbackDot
    >>> x = jax.random.normal(jax.random.key(0), (32, 128))
    >>> layer = nnx.Linear(128, 64, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> _ = layer(x)  # trains
    >>> frozen = freeze(layer, x)
    >>> layer.eval()
    >>> bool(jnp.all(frozen(x) == layer(x)))
    True
    """
    check_unshared(model)
    model = nnx.clone(model)
    model.eval()
    layers = _find_layers(model)
    for name, (_, dot) in layers.items():
        dot.call = Call(name)
    args, kwargs = jax.tree.map(zeros, (args, kwargs))
    nnx.eval_shape(lambda model: model(*args, **kwargs), model)
    for layer, dot in layers.values():
        _freeze_layer(layer, dot)
    return model


def _find_layers(model: nnx.Module) -> dict[str, tuple[Any, FreezableDot]]:
    """Path to layer and dot, of layers that multiply by one that can be frozen."""
    layers: dict[str, tuple[Any, FreezableDot]] = {}
    thetas = {}
    modules = list(nnx.iter_modules(model))
    ops = {id(_op_of(layer)) for _, layer in modules if isinstance(layer, LAYERS)}
    for path, layer in modules:
        dot = _dot_of(layer)
        if dot is None or id(layer) in ops:
            continue
        name = _name(path)
        if not isinstance(layer, LAYERS):
            raise ValueError(f"{TAKEN}; {name!r} is a {type(layer).__name__}")
        if isinstance(layer, nnx.Conv) and layer.mask is not None:
            raise ValueError(f"freeze takes no nnx.Conv with a mask, as {name!r} has")
        if dot.weight is not None:
            raise ValueError(f"freeze takes a model once; {name!r} is frozen")
        check_recipe(dot.recipe, name)
        thetas[name] = dot.recipe, dot.theta[...]
        layers[name] = layer, dot
    frozen = {id(dot) for _, dot in layers.values()}
    for path, module in modules:
        if isinstance(module, FreezableDot) and id(module) not in frozen:
            raise ValueError(
                f"{TAKEN}; what else multiplies by {_name(path)!r} would stay in floats"
            )
    if not layers:
        raise ValueError("freeze found no layer that multiplies by a FallbackDot")
    check_thetas(thetas)
    return layers


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path)) or "(root)"


def _dot_of(module: nnx.Module) -> FreezableDot | None:
    """What a module multiplies by, if it can be frozen."""
    op = _op_of(module)
    dot = op.dot_general if isinstance(op, FallbackOp) else op
    return dot if isinstance(dot, FreezableDot) else None


def _op_of(module: nnx.Module) -> Any:
    """What a module was given to multiply by, if anything."""
    names = ("dot_general", "einsum_op", "conv_general_dilated")
    return next((vars(module)[name] for name in names if name in vars(module)), None)


def _freeze_layer(layer: Any, dot: FreezableDot) -> None:
    kernel, call, dot.call = layer.kernel[...], dot.call, None
    assert call is not None
    if (dimension_numbers := call.dimension_numbers) is None:
        raise ValueError(
            f"the call that freeze was given does not run {call.layer!r}; pass "
            "arguments that run every quantized layer"
        )

    def quantize(kernel: jax.Array, state: dict[str, jax.Array]) -> QTensor:
        return quantize_weight(
            kernel.astype(call.dtype).reshape(call.shape),
            dimension_numbers,
            threshold.call_seed(threshold.canonicalize_state(state)),
            recipe=dot.recipe,
            implementation=dot.implementation,
        ).codes

    # A convolution multiplies by its kernel in feature groups.
    shape = layer.kernel_shape if isinstance(layer, nnx.Conv) else call.shape
    for _ in range(kernel.ndim - len(shape)):  # axes of stacked layers
        quantize = jax.vmap(quantize)
    dot.weight = nnx.data(FrozenCodes(quantize(kernel, dot.state())))
    dot.axes = rhs_axes(dimension_numbers)
    layer.kernel = FrozenKernel(shape, kernel.dtype)
