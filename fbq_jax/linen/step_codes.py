"""Weights that a training step quantizes once, for all of its microbatches.

A step that accumulates gradients calls its model once for each microbatch, with the
same parameters.  ``quantize_weights_once`` calls the model before the loop and makes
each layer store the codes of its weight in a collection.  A layer that finds its codes
there multiplies by them, and does not quantize its weight.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from fbq_jax.core.frozen_weight import (
    Making,
    check_found,
    has_constant_codes,
    quantize_step_weight,
    quantizes_weights,
)
from fbq_jax.core.visitors import FoundCodes, WeightCodes, visiting
from fbq_jax.linen.state import KERNEL, WEIGHT, LayerWeight, codes_collection
from fbq_jax.model_kind import check_linen


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

    >>> import jax
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
    making = _StepCodes()
    # Others may change, too, as in training; the changes are dropped.
    mutable = DenyList(("params", *_frozen_collections(variables)))
    with visiting(making):
        _, updates = model.apply(variables, *args, mutable=mutable, **kwargs)
    collections = {collection for _, collection in making.made.values()}
    codes = {name: updates[name] for name in collections if name in updates}
    check_found(codes, making.left, stacklevel=2)
    return codes


def _frozen_collections(variables: Mapping[str, Any]) -> list[str]:
    """The collections with codes of frozen layers, which do not train."""

    def is_codes(x: Any) -> bool:
        return isinstance(x, WeightCodes)

    return [
        name
        for name, tree in variables.items()
        if any(map(is_codes, jax.tree.leaves(tree, is_leaf=is_codes)))
    ]


class _StepCodes(Making):
    """The visitor for which layers store the codes of a step."""

    def codes(self, product: Any) -> FoundCodes | None:
        """The codes that a step's microbatches share, which the layer stores."""
        if not isinstance(product, LayerWeight) or product.parameter is None:
            return None
        if WEIGHT in product.variable.value or product.has_stand_in:
            return None
        recipe, module = product.config.recipe, product.module
        collection = codes_collection(product.collection)
        if not quantizes_weights(recipe):
            return None, False
        library = type(module).__module__.split(".")[0]
        # Nobody knows what other modules make of their kernel, or of an activation.
        is_kernel = library in ("flax", "fbq_jax") and module.has_variable(
            "params", KERNEL
        )
        if not has_constant_codes(recipe) or not is_kernel:
            self.left.add(product.layer)
            return None, False
        if not module.is_mutable_collection(collection):
            raise ValueError(
                f"layer {product.layer!r} cannot store codes in the collection "
                f"{collection!r}: if the layer is inside nn.scan or nn.vmap, list it "
                "beside 'params', in variable_axes or variable_broadcast"
            )
        weight = quantize_step_weight(
            product.config, product.operand(), product.dimension_numbers
        )
        weight = replace(
            weight, parameter=product.parameter.path, as_matrix=product.as_matrix
        )
        module.put_variable(collection, product.variable.name, weight)
        self.made[product.layer] = weight.axes, collection
        return weight.codes, False
