"""Rules for Flax NNX models: the path of each layer decides its recipe."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from fbq_jax.core.dot_general import DotConfig
from fbq_jax.nnx.dot import Layer, layer_op
from fbq_jax.nnx.naming import name_layers
from fbq_jax.recipes import fallback, path_rules
from fbq_jax.recipes.path_rules import RulesReport
from fbq_jax.recipes.schema import Recipe


def apply_rules(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *,
    rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
) -> RulesReport:
    """Gives each linear layer of a model the recipe of the first rule that matches.

    Rules match the paths, such as ``"blocks/0/mlp/up"``, of the model's ``nnx.Linear``,
    ``nnx.LinearGeneral``, ``nnx.Einsum`` and ``nnx.Conv`` layers
    (``fbq_jax.recipes.path_rules``).  A layer gets its own ``FallbackDot`` as its
    ``dot_general``, ``FallbackEinsum`` as its ``einsum_op`` or ``FallbackConv`` as its
    ``conv_general_dilated``.  If its rule is None, it gets the unquantized op:
    ``lax.dot_general``, ``jnp.einsum`` or ``lax.conv_general_dilated``.  A layer that
    no rule matches keeps its op.  Warnings name every quantized layer by its path
    (``fbq_jax.nnx.name_layers``).

    Args:
      model: changed in place; an error leaves it unchanged.
      rules: a mapping from patterns to recipes, tried in order.
      rngs: seeds the noise of the layers, as in ``FallbackDot``.
      implementation: the implementation of the layers' ops, as in ``FallbackDot``.

    Returns:
      The rule of each layer, the rules that apply to no layer, and the layers without a
      rule.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is not a regular expression, or no implementation has this
        name; or a matched layer is a stack made by ``nnx.vmap``.  Each layer of a stack
        needs its own state: apply rules where ``nnx.vmap`` makes one layer.

    >>> model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    >>> from fbq_jax import recipes
    >>> rules = {"out": None, "query|key": recipes.fallback, "up": None}
    >>> report = apply_rules(model, rules)
    >>> report.layers
    {'key': 'query|key', 'out': 'out', 'query': 'query|key'}
    >>> report.unused_rules, report.unmatched_layers
    (('up',), ('value',))
    """
    pairs = path_rules.as_pairs(rules)
    DotConfig(fallback, implementation)  # checks the implementation
    found: dict[str, str | None] = {}
    matched: list[tuple[Layer, Recipe | None]] = []
    for parts, module in nnx.iter_modules(model):
        if not isinstance(module, Layer):
            continue
        path = "/".join(map(str, parts))
        found[path], recipe = path_rules.first_match(pairs, path)
        if recipe is not None and _is_stack(module):
            raise ValueError(
                f"layer {path!r} is a stack of layers, with a kernel of shape "
                f"{module.kernel.shape}: apply rules where one of them is made, inside "
                "nnx.vmap"
            )
        if found[path] is not None:
            matched.append((module, recipe))
    for layer, recipe in matched:
        _set_op(layer, recipe, rngs=rngs, implementation=implementation)
    name_layers(model)
    return path_rules.report(pairs, found)


def _set_op(layer: Layer, recipe: Recipe | None, **options: Any) -> None:
    """Gives a layer the op of a recipe, with the options of ``FallbackDot``.

    None is the unquantized op.
    """
    kind = layer_op(layer)
    if recipe is None:
        op = nnx.static(kind.unquantized)
    else:
        op = nnx.data(kind.quantized(recipe, **options))
    setattr(layer, kind.name, op)
    if isinstance(layer, nnx.LinearGeneral):
        layer.dot_general_cls = None  # takes precedence over dot_general


def _is_stack(layer: Layer) -> bool:
    """Whether the parameters have an axis of layers."""
    if isinstance(layer, nnx.Linear):
        return layer.kernel.ndim != 2
    if isinstance(layer, nnx.Einsum | nnx.Conv):
        return layer.kernel.ndim != len(layer.kernel_shape)
    sizes = (*layer.batch_axis, *layer.in_features, *layer.out_features)
    return layer.kernel.ndim != len(sizes)
