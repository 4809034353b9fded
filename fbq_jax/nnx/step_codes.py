"""Weights that a training step of NNX quantizes once, for all of its microbatches."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from fbq_jax.core.frozen_weight import (
    as_array,
    check_found,
    has_constant_codes,
    quantizes_weights,
)
from fbq_jax.core.tracing import UnknownDependentsError
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.dot import (
    FallbackDot,
    Layer,
    StepCodes,
    dot_of,
    in_step,
    is_activations_dot,
    layer_op,
)
from fbq_jax.nnx.freezing import unknown_weight
from fbq_jax.nnx.naming import dots_by_path
from fbq_jax.nnx.sharing import check_unshared
from fbq_jax.nnx.tracing import MakingCodes, changing_weights, make_weights, name_ops


@contextlib.contextmanager
def quantize_weights_once(
    model: nnx.Module, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Quantizes a model's weights once, for all calls of the model in this context.

    ``fbq_jax.quantize_weights_once`` for NNX.  A jitted step that accumulates gradients
    runs its loop over microbatches in it::

        with quantize_weights_once(model, batches[0]):
            losses, grads = microbatches(model, batches)  # an nnx.scan

    Results do not change, because weights are rounded to nearest.  Update the
    parameters after the context, because the codes do not follow them.  The codes take,
    with a gradient, two bytes per parameter until the context ends, sharded as the
    weights are.  Each ``FallbackDot`` has them as a variable of the type ``StepCodes``,
    to which an ``nnx.StateAxes`` gives the axis of ``nnx.Param``.  Call ``nnx.split``
    inside the context, so that the state has them.

    Args:
      model: its layers get the codes; nothing else of it changes.
      *args: the arguments of a call of the model, such as the first microbatch, with
        which the model is traced.  Arrays may be ``jax.ShapeDtypeStruct``.
      **kwargs: keyword arguments of the same call.

    Raises:
      TypeError: the model is not one of NNX.
      ValueError: no layer quantizes a weight with a ``FallbackDot``; two layers share
        one; a layer multiplies by its kernel in two ways, or is a stack of layers whose
        axis is not the first; or, in a call, codes belong to another product, or
        have outlived the context.

    Warns:
      UserWarning: layers quantize their weights in every call, because those are
        rounded stochastically or are not the ``kernel`` of a layer of Flax or fbq_jax
        as it is, because the traced call does not run them, or because their recipe has
        ``where_slower="float"``.

    >>> import jax.numpy as jnp
    >>> from fbq_jax.nnx import FallbackDot
    >>> layer = nnx.Linear(64, 8, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> x = jnp.ones((16, 64))
    >>> with quantize_weights_once(layer, x):
    ...     y = layer(x)
    ...     layer.dot_general.step_codes.get_value().codes.colwise.shape
    (1, 8, 64)
    >>> print(layer.dot_general.step_codes)
    None
    """
    dots, weights = make_step_weights(model, args, kwargs, stacklevel=4)
    before = {path: dots[path].step_codes for path in weights}
    for path, weight in weights.items():
        dots[path].step_codes = nnx.data(StepCodes(weight))
    try:
        with in_step(True):
            yield
    finally:
        for path, codes in before.items():
            dots[path].step_codes = nnx.static(None) if codes is None else codes


def make_step_weights(
    model: nnx.Module, args: Any, kwargs: Any, stacklevel: int
) -> tuple[dict[str, FallbackDot], dict[str, Any]]:
    """The ops of a model, and the codes of their weights, by their paths.

    Arguments and errors are as in ``quantize_weights_once``; ``stacklevel`` says where
    warnings point, as seen from here.
    """
    check_nnx("quantize_weights_once", model)
    check_unshared(model)
    dots = {
        path: dot
        for path, dot in dots_by_path(model).items()
        if quantizes_weights(dot.recipe)
        and dot.weight is None
        and not is_activations_dot(path.rpartition("/")[2])
    }
    layers = layers_by_dot(model)
    constant = {
        path
        for path, dot in dots.items()
        if id(dot) in layers
        and unknown_weight(layers[id(dot)]) is None
        and has_constant_codes(dot.recipe)
    }
    args, kwargs = jax.tree.map(as_array, (args, kwargs))
    try:
        changing = changing_weights(model, constant, args, kwargs)
    except UnknownDependentsError:
        changing = list(constant)  # which the warning names
    constant.difference_update(changing)
    weights = make_weights(
        name_ops(model), MakingCodes(constant, for_step=True), args, kwargs
    )
    check_found(weights, dots.keys() - weights.keys(), stacklevel=stacklevel)
    return dots, weights


def layers_by_dot(model: nnx.Module) -> dict[int, Layer]:
    """The layer that multiplies by each ``FallbackDot``, by the ``id`` of the dot."""
    layers = {}
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Layer):
            dot = dot_of(getattr(module, layer_op(module).name))
            layers[id(dot)] = module
    return layers
