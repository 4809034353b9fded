"""Weights that a training step quantizes once, for all of its microbatches.

A step that accumulates gradients calls its model once for each microbatch, with the
same parameters.  ``quantize_weights_once`` calls the model before the loop and makes
each layer store the codes of its weight in a collection.  A layer that finds its codes
there multiplies by them, and does not quantize its weight.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.layer_stats import layer_path
from fbq_jax.core.step_codes import (
    StepWeight,
    check_found,
    has_constant_codes,
    quantize_step_weight,
    quantizes_weights,
)
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.linen.frozen import KERNEL
from fbq_jax.model_kind import check_linen

# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_making = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)
class _Making:
    """The codes that a call of a model makes.

    Attributes:
      collections: the collections with codes.
      left: the layers that will quantize their weights in every call.
    """

    collections: set[str] = dataclasses.field(default_factory=set)
    left: set[str] = dataclasses.field(default_factory=set)


def quantize_weights_once(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The codes of a model's weights, for all microbatches of a training step.

    A jitted step calls this before its loop over microbatches, and passes the codes to
    ``apply`` beside the parameters::

        codes = quantize_weights_once(model, variables, batches[0])

        def loss(params, state, batch):
            y, state = model.apply(
                {"params": params, **state, **codes}, batch, mutable=["fallback"])
            ...

    Results do not change, because weights are rounded to nearest.  The codes belong to
    these parameters: the next step makes new ones.  They take, with a gradient, two
    bytes per parameter until the loop ends, sharded as the weights are.  A
    model lists their collection, ``"fallback_codes"``, beside ``"params"`` in the
    ``variable_axes`` or ``variable_broadcast`` of ``nn.scan`` and ``nn.vmap``, unless
    ``fbq_jax.quantize`` made it.

    Args:
      model: a Linen model whose layers have a ``FallbackDot``.
      variables: its parameters and state.
      *args: the arguments of ``model.apply``, such as the first microbatch.  Their
        values do not matter, and XLA drops what the codes do not depend on.
      **kwargs: its keyword arguments, such as ``method`` and ``rngs``.

    Returns:
      The collection of codes, ``{"fallback_codes": ...}``.

    Raises:
      TypeError: the model is not one of Linen.
      ValueError: no layer quantizes a weight with a ``FallbackDot``, or ``nn.scan`` or
        ``nn.vmap`` does not list the collection.

    Warns:
      UserWarning: layers quantize their weights in every call, because those are
        rounded stochastically or are not the layer's parameter ``kernel``, or because
        their recipe has ``where_slower="float"``.

    >>> import jax.numpy as jnp
    >>> from fbq_jax import fallback_dot
    >>> layer = nn.Dense(8, dot_general=fallback_dot)
    >>> x = jnp.ones((4, 16, 64))
    >>> variables = layer.init(jax.random.key(0), x[0])
    >>> codes = quantize_weights_once(layer, variables, x[0])
    >>> codes["fallback_codes"]["dot_general"].codes.colwise.shape
    (1, 8, 64)
    >>> y = layer.apply(variables, x[0])
    >>> bool(jnp.all(layer.apply({**variables, **codes}, x[0]) == y))
    True
    """
    check_linen("quantize_weights_once", model)
    kwargs = {name: value for name, value in kwargs.items() if name != "mutable"}
    with _make_codes() as making:
        # Other collections may change, too, as in training; the changes are dropped.
        mutable = DenyList("params")
        _, updates = model.apply(variables, *args, mutable=mutable, **kwargs)
    codes = {name: updates[name] for name in making.collections if name in updates}
    check_found(codes, making.left, stacklevel=2)
    return codes


@contextlib.contextmanager
def _make_codes() -> Iterator[_Making]:
    making = _Making()
    with _making(making):
        yield making


def codes_collection(collection: str) -> str:
    """The collection of codes, of layers that keep their state in ``collection``."""
    return f"{collection}_codes"


def find_codes(
    config: DotConfig,
    module: nn.Module,
    collection: str,
    name: str,
    make: Callable[[], jax.Array],
    dimension_numbers: DimensionNumbers,
) -> Layouts | None:
    """The codes of a layer's weight, made or found in a collection; or None.

    Args:
      config: the recipe and the implementation.
      module: the layer.
      collection: the collection of codes.
      name: the name of the layer's state.
      make: makes the right operand of the product.
      dimension_numbers: of the product.

    Raises:
      ValueError: codes are made inside ``nn.scan`` or ``nn.vmap``, which do not list
        the collection; or codes are of another weight or product.
    """
    making: _Making | None = _making.value
    layer = layer_path((*module.path, name))
    if making is None:
        if not module.has_variable(collection, name):
            return None
        weight: StepWeight = module.get_variable(collection, name)
        return weight.codes_for(layer, make, dimension_numbers)
    if not quantizes_weights(config.recipe):
        return None
    if not has_constant_codes(config.recipe) or not _multiplies_kernel(module):
        making.left.add(layer)
        return None
    if not module.is_mutable_collection(collection):
        raise ValueError(
            f"layer {layer!r} cannot store codes in the collection {collection!r}: "
            "if the layer is inside nn.scan or nn.vmap, list it beside 'params', in "
            "variable_axes or variable_broadcast"
        )
    weight = quantize_step_weight(config, make(), dimension_numbers)
    module.put_variable(collection, name, weight)
    making.collections.add(collection)
    return weight.codes


def _multiplies_kernel(module: nn.Module) -> bool:
    """Whether a layer's product reads its kernel only, and no activation."""
    library = type(module).__module__.split(".")[0]
    return library in ("flax", "fbq_jax") and module.has_variable("params", KERNEL)
