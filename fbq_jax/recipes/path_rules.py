"""Rules for models: the path of a layer decides its recipe.

A rule is a regular expression for paths such as ``"decoder/layers_3/mlp/up"`` and the
recipe of the layers that it matches, or None for layers that stay unquantized.  As in
Qwix, the expression must match the entire path: ``"mlp"`` matches only a layer of that
name at the root, ``".*/mlp/.*"`` every layer inside an ``mlp`` that is not at the root.
The path of the root is empty.  A key that is no string, such as a number or a tuple
in NNX, is in the path as ``str`` shows it: ``"layers/(0, 1)/up"``.  The first rule that
matches a layer applies.

A product of two activations, as in attention, stays unquantized unless a rule names it.
Its name is the path of its module, ``@activations_``, and its number in the module,
from 0: ``"layers_3/attn@activations_0"`` is usually queries times keys, and
``"...@activations_1"`` attention weights times values.  Only patterns that contain
``@`` apply to such products: ``".*@activations_.*"`` matches all.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from fbq_jax.recipes.schema import Recipe

Pairs = tuple[tuple[str, Recipe | None], ...]


class Match(NamedTuple):
    """The rule that applies to a layer; the pattern is None if no rule does."""

    pattern: str | None
    recipe: Recipe | None


def as_pairs(rules: Mapping[str, Recipe | None] | Pairs) -> Pairs:
    """Checks rules and returns them as pairs of pattern and recipe.

    Raises:
      TypeError: ``rules`` is not a mapping, a pattern is not a string, or a recipe is
        neither a ``Recipe`` nor None.
      ValueError: a pattern is not a regular expression.
    """
    if not isinstance(rules, Mapping | tuple):
        raise TypeError(
            "rules are a mapping from patterns of layer paths to recipes, such as "
            f"{{'lm_head': None, '.*': recipes.fallback}}; got {rules!r}"
        )
    pairs = tuple(dict(rules).items())
    for pattern, recipe in pairs:
        if not isinstance(pattern, str):
            raise TypeError(f"a rule's pattern is a string; got {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"the rule {pattern!r} is not a regular expression: {error}. '.*' "
                "matches all layers"
            ) from None
        if not isinstance(recipe, Recipe | None):
            raise TypeError(
                f"the rule {pattern!r} takes a Recipe, such as "
                "fbq_jax.recipes.fallback, or None for an unquantized layer; got "
                f"{recipe!r}"
            )
    return pairs


def first_match(rules: Pairs, path: str) -> Match:
    """The first rule that matches the path of a layer."""
    matches = (Match(*rule) for rule in rules if re.fullmatch(rule[0], path))
    return next(matches, Match(None, None))


def activations_name(path: str, number: int) -> str:
    """The name of a product of two activations.

    Args:
      path: the path of its module.
      number: how many such products the module computes before.
    """
    return f"{path}{_MARK}activations_{number}"


def activations_rules(rules: Pairs) -> Pairs:
    """The rules that apply to products of two activations."""
    return tuple(rule for rule in rules if _MARK in rule[0])


def refuse_activations_rules(rules: Pairs, remedy: str) -> None:
    """Raises ValueError if a rule names a product of two activations."""
    if refused := activations_rules(rules):
        raise ValueError(
            f"the rule {refused[0][0]!r} is for products of two activations, which "
            f"are not reached here: {remedy}"
        )


_MARK = "@"
