"""What is trained is what is served: ``freeze`` for Flax NNX."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from fbq_jax import threshold
from fbq_jax.frozen import (
    FrozenKernel,
    check_recipe,
    check_thetas,
    quantize_weight,
    rhs_axes,
    zeros,
)
from fbq_jax.nnx_dot import FallbackEinsum
from fbq_jax.nnx_frozen import Call, FreezableDot, FrozenCodes
from fbq_jax.nnx_unshared import check_unshared
from fbq_jax.qtensor import QTensor

M = TypeVar("M", bound=nnx.Module)

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def freeze(model: M, *args: Any, **kwargs: Any) -> M:
    """Turns the weights of a model's quantized layers into INT8 codes and scales.

    ``fbq_jax.freeze`` for NNX.  The layers are ``nnx.Linear`` and ``nnx.LinearGeneral``
    (also those of attention) that multiply by a ``fbq_jax.nnx.FallbackDot``, and
    ``nnx.Einsum`` by a ``fbq_jax.nnx.FallbackEinsum``.  They lose their kernel; codes
    and scales are the variable ``dot_general.weight``, which an einsum has in its
    ``einsum_op``.

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
        with subscripts of its own); something else than these layers does; or two of
        them share one ``FallbackDot``.

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
    ops = {id(layer.einsum_op) for _, layer in modules if isinstance(layer, nnx.Einsum)}
    for path, layer in modules:
        dot = _dot_of(layer)
        if dot is None or id(layer) in ops:
            continue
        name = _name(path)
        if not isinstance(layer, LAYERS):
            raise ValueError(
                "freeze takes nnx.Linear, nnx.LinearGeneral and nnx.Einsum; "
                f"{name!r} is a {type(layer).__name__}"
            )
        if dot.weight is not None:
            raise ValueError(f"freeze takes a model once; {name!r} is frozen")
        check_recipe(dot.recipe, name)
        thetas[name] = dot.recipe, dot.theta[...]
        layers[name] = layer, dot
    frozen = {id(dot) for _, dot in layers.values()}
    for path, module in modules:
        if isinstance(module, FreezableDot) and id(module) not in frozen:
            raise ValueError(
                "freeze takes nnx.Linear, nnx.LinearGeneral and nnx.Einsum; what else "
                f"multiplies by {_name(path)!r} would stay in floats"
            )
    if not layers:
        raise ValueError("freeze found no layer that multiplies by a FallbackDot")
    check_thetas(thetas)
    return layers


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path)) or "(root)"


def _dot_of(module: nnx.Module) -> FreezableDot | None:
    """What a module multiplies by, if it can be frozen."""
    op = vars(module).get("einsum_op", vars(module).get("dot_general"))
    dot = op.dot_general if isinstance(op, FallbackEinsum) else op
    return dot if isinstance(dot, FreezableDot) else None


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
            kernel.astype(call.dtype),
            dimension_numbers,
            threshold.call_seed(threshold.clean(state)),
            recipe=dot.recipe,
            implementation=dot.implementation,
        ).codes

    for _ in range(kernel.ndim - len(call.shape)):  # axes of stacked layers
        quantize = jax.vmap(quantize)
    dot.weight = nnx.data(FrozenCodes(quantize(kernel, dot.state())))
    dot.axes = rhs_axes(dimension_numbers)
    layer.kernel = FrozenKernel(call.shape, kernel.dtype)
