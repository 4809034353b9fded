"""Rules for whole models: which layer gets which recipe, by the layer's path.

A rule is a regular expression for paths such as ``"decoder/layers_3/mlp/up"`` and the
recipe of the layers that it matches, or None for layers that stay in float.  It has to
match all of a path, as in Qwix: ``"mlp"`` matches a layer of that name at the root and
nothing else, ``".*/mlp/.*"`` all that is in an ``mlp`` of a deeper module.  The root's
own path is empty.  Of several rules that match, the first counts.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from fbq_jax.recipes.schema import Recipe

Pairs = tuple[tuple[str, Recipe | None], ...]


class RulesReport(NamedTuple):
    """What rules did to a model.

    Attributes:
      layers: the path of each layer that a rule took, to that rule's pattern.
      unused_rules: the patterns that took no layer: they match none, or rules before
        them took all that they match.
      unmatched_layers: the paths of layers that no rule took.
    """

    layers: dict[str, str]
    unused_rules: tuple[str, ...]
    unmatched_layers: tuple[str, ...]


def check(rules: Mapping[str, Recipe | None] | Pairs) -> Pairs:
    """The rules as pairs of pattern and recipe.

    Raises:
      TypeError: they are no mapping, or a rule's pattern or recipe is none.
      ValueError: a pattern is no regular expression.
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
                f"the rule {pattern!r} is no regular expression: {error}"
            ) from None
        if not isinstance(recipe, Recipe | None):
            raise TypeError(
                f"the rule {pattern!r} takes a Recipe, such as "
                f"fbq_jax.recipes.fallback, or None for float; got {recipe!r}"
            )
    return pairs


def find(rules: Pairs, path: str) -> tuple[str, Recipe | None] | None:
    """The rule that takes the layer of a path; None if none does."""
    matches = (rule for rule in rules if re.fullmatch(rule[0], path))
    return next(matches, None)


def report(rules: Pairs, found: Mapping[str, str | None]) -> RulesReport:
    """What the rules did, of each layer's path and the pattern that took it, if any."""
    layers = {path: pattern for path, pattern in found.items() if pattern is not None}
    taken = set(layers.values())
    return RulesReport(
        layers,
        tuple(pattern for pattern, _ in rules if pattern not in taken),
        tuple(path for path, pattern in found.items() if pattern is None),
    )
