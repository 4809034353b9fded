"""Rules for whole models in Flax NNX: each layer gets the recipe of its path."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from fbq_jax.nnx.dot import FallbackConv, FallbackDot, FallbackEinsum
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.path_rules import RulesReport
from fbq_jax.recipes.schema import Recipe

Layer = nnx.Linear | nnx.LinearGeneral | nnx.Einsum | nnx.Conv


def apply_rules(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *,
    rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
) -> RulesReport:
    """Gives each linear layer of a model the recipe of the first rule that matches it.

    The layers are the model's ``nnx.Linear``, ``nnx.LinearGeneral``, ``nnx.Einsum`` and
    ``nnx.Conv``; rules match their paths, such as ``"blocks/0/mlp/up"``
    (``fbq_jax.recipes.path_rules``).  A layer gets a ``FallbackDot`` of its own as its
    ``dot_general``, a ``FallbackEinsum`` as its ``einsum_op`` or a ``FallbackConv`` as
    its ``conv_general_dilated``.  By a rule that is None it gets ``lax.dot_general``,
    ``jnp.einsum`` or ``lax.conv_general_dilated``: float.  A layer that no rule matches
    stays as it is.

    Args:
      model: changed in place, or, on an error, not at all.
      rules: a mapping from patterns to recipes, in the order in which they are tried.
      rngs: as for ``FallbackDot``.
      implementation: as for ``FallbackDot``.

    Returns:
      Which rule took which layer, the rules that took none and the layers that none
      took.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is no regular expression; or a layer that a rule takes is a
        stack made by ``nnx.vmap``, each layer of which needs state of its own: apply
        rules where one layer of the stack is made.

    >>> model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    >>> from fbq_jax import recipes
    >>> rules = {"out": None, "query|key": recipes.fallback, "up": None}
    >>> report = apply_rules(model, rules)
    >>> report.layers
    {'key': 'query|key', 'out': 'out', 'query': 'query|key'}
    >>> report.unused_rules, report.unmatched_layers
    (('up',), ('value',))
    """
    pairs = path_rules.check(rules)
    found: dict[str, str | None] = {}
    taken: list[tuple[Layer, Recipe | None]] = []
    for parts, module in nnx.iter_modules(model):
        if not isinstance(module, Layer):
            continue
        path = "/".join(map(str, parts))
        rule = path_rules.find(pairs, path)
        found[path] = None if rule is None else rule[0]
        if rule is not None:
            if rule[1] is not None and _is_stack(module):
                raise ValueError(
                    f"layer {path!r} is a stack of layers, its kernel of shape "
                    f"{module.kernel.shape}: apply rules where one of them is made, "
                    "inside nnx.vmap"
                )
            taken.append((module, rule[1]))
    for layer, recipe in taken:
        _set(layer, recipe, rngs, implementation)
    return path_rules.report(pairs, found)


def _set(
    layer: Layer,
    recipe: Recipe | None,
    rngs: nnx.Rngs | None,
    implementation: str | None,
) -> None:
    """Gives a layer the op of a recipe."""
    in_floats: Any
    quantized: Any
    name, in_floats, quantized = "dot_general", lax.dot_general, FallbackDot
    if isinstance(layer, nnx.Einsum):
        name, in_floats, quantized = "einsum_op", jnp.einsum, FallbackEinsum
    elif isinstance(layer, nnx.Conv):
        name, in_floats = "conv_general_dilated", lax.conv_general_dilated
        quantized = FallbackConv
    op = nnx.static(in_floats)
    if recipe is not None:
        op = nnx.data(quantized(recipe, rngs=rngs, implementation=implementation))
    setattr(layer, name, op)
    if isinstance(layer, nnx.LinearGeneral):
        layer.dot_general_cls = None  # which would go first


def _is_stack(layer: Layer) -> bool:
    if isinstance(layer, nnx.Linear):
        return layer.kernel.ndim != 2
    if isinstance(layer, nnx.Einsum | nnx.Conv):
        return layer.kernel.ndim != len(layer.kernel_shape)
    sizes = (*layer.batch_axis, *layer.in_features, *layer.out_features)
    return layer.kernel.ndim != len(sizes)
