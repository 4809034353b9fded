"""What rules did to a model: its quantized products, and what stayed in float.

Ops report their products while a model is traced, each with the parameter of its layer
that it reads.  All other parameters stay in float, as far as the report knows.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from fbq_jax.recipes.path_rules import Pairs, activations_rules, first_match
from fbq_jax.recipes.presets import recipe_name
from fbq_jax.recipes.schema import Recipe

#: Why a parameter stays in float: the module that holds it takes no op.
WITHOUT_OP = "its module takes no op (see fbq_jax.contrib.qwix)"
#: Why a parameter stays in float although its layer has an op.
NOT_REACHED = "no op of its layer reached it"
#: Why nobody knows of a parameter: its layer has several of one size.
AMBIGUOUS = "unknown: an op of its layer reads it or another parameter"

_SHOWN_LAYERS = 4  # in a warning


class QuantizedParameter(NamedTuple):
    """A parameter that a quantized product reads.

    Attributes:
      parameter: its path, such as ``"mlp/up/kernel"``; the path of the layer if that
        multiplies by no parameter of its own, as a tied head, or by one of several.
      shape: its shape as the product reads it, without the axes of stacked layers.
      layer: the path of the layer that multiplies.
      rule: the pattern of the layer's rule; None if the layer had its op before.
      recipe: the recipe of the product.
      ignores_precision: whether the layer asked for a precision that was ignored
        (``ignore_precision=True``).
    """

    parameter: str
    shape: tuple[int, ...]
    layer: str
    rule: str | None
    recipe: Recipe
    ignores_precision: bool = False


class ActivationProduct(NamedTuple):
    """A product of two activations.

    Attributes:
      name: its name, such as ``"attn@activations_0"`` (``recipes.path_rules``).
      shape: the shape of its right operand.
      rule: the pattern of its rule; None if no rule names it.
      recipe: its recipe; None if it stayed in float.
    """

    name: str
    shape: tuple[int, ...]
    rule: str | None
    recipe: Recipe | None


class FloatProduct(NamedTuple):
    """A product that a layer with an op, or a rule, computes in float.

    Attributes:
      layer: the path of the layer.
      operand: the path of the parameter that is the right operand, or the operand's
        shape.
    """

    layer: str
    operand: str | tuple[int, ...]


class FloatParameter(NamedTuple):
    """A parameter of two or more dimensions that stayed in float.

    Attributes:
      parameter: its path.
      shape: its shape.
      reason: why no quantized product reads it, or what else reads it in float.
    """

    parameter: str
    shape: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class RulesReport:
    """What rules did to a model; ``print`` shows it as a table.

    Attributes:
      layers: maps the path of each layer that a rule matched to the rule's pattern.
      unused_rules: the patterns that apply to no layer, because they match none or an
        earlier rule matched first.
      unmatched_layers: the paths of the layers that no rule matched.
      products: the parameters that quantized products read.
      float_parameters: all other parameters of two or more dimensions.
      activation_products: the products of two activations that rules can name.

    >>> from fbq_jax import recipes
    >>> report = RulesReport(
    ...     {"up": ".*"}, ("head",), (),
    ...     (QuantizedParameter("up/kernel", (16, 32), "up", ".*", recipes.block),),
    ...     (FloatParameter("embed/embedding", (99, 16), "no product: gather"),),
    ... )
    >>> print(report)
    parameter        shape    rule  recipe
    up/kernel        16 x 32  .*    block
    embed/embedding  99 x 16        float: no product: gather
    rules without effect: 'head'
    """

    layers: dict[str, str]
    unused_rules: tuple[str, ...]
    unmatched_layers: tuple[str, ...]
    products: tuple[QuantizedParameter, ...] = ()
    float_parameters: tuple[FloatParameter, ...] = ()
    activation_products: tuple[ActivationProduct, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("parameter", "shape", "rule", "recipe")]
        rows += [
            (p.parameter, _shape(p.shape), _rule(p.rule), _recipe(p))
            for p in self.products
        ]
        rows += [_activations_row(p) for p in self.activation_products if p.recipe]
        rows += [
            (p.parameter, _shape(p.shape), "", f"float: {p.reason}")
            for p in self.float_parameters
        ]
        rows += [_activations_row(p) for p in self.activation_products if not p.recipe]
        lines = _align(rows)
        if self.unused_rules:
            names = ", ".join(map(repr, self.unused_rules))
            lines.append(f"rules without effect: {names}")
        if self.unmatched_layers:
            names = ", ".join(path or "(root)" for path in self.unmatched_layers)
            lines.append(f"layers without a rule: {names}")
        return "\n".join(lines)


def activation_product(
    rules: Pairs, name: str, shape: tuple[int, ...]
) -> ActivationProduct:
    """What rules make of a product of two activations.

    Args:
      rules: all rules.
      name: its name (``path_rules.activations_name``).
      shape: the shape of its right operand.
    """
    return ActivationProduct(name, shape, *first_match(activations_rules(rules), name))


def rules_report(
    rules: Pairs,
    found: Mapping[str, str | None],
    matrices: Mapping[str, tuple[int, ...]],
    products: Iterable[QuantizedParameter],
    activation_products: Iterable[ActivationProduct] = (),
    float_products: Iterable[FloatProduct] = (),
) -> RulesReport:
    """Makes a report.

    Args:
      rules: all rules.
      found: maps the path of each layer to the pattern that matched it, or None.
      matrices: the shapes of the parameters that have two or more axes in one layer.
      products: the quantized products of the model, without their rules.
      activation_products: the products of two activations that rules can name.
      float_products: the products that layers compute in float.
    """
    activation_products = tuple(activation_products)
    layers = {path: pattern for path, pattern in found.items() if pattern is not None}
    used = {*layers.values(), *(product.rule for product in activation_products)}
    rows = [p._replace(rule=found.get(p.layer)) for p in dict.fromkeys(products)]
    order = {path: number for number, path in enumerate(matrices)}
    rows.sort(key=lambda row: order.get(row.parameter, len(order)))
    names = {row.parameter for row in rows}
    holders = {path: path.rpartition("/")[0] for path in matrices}
    layer_of = holders | _tied(found, matrices, holders, float_products)
    return RulesReport(
        layers,
        tuple(pattern for pattern, _ in rules if pattern not in used),
        tuple(path for path, pattern in found.items() if pattern is None),
        tuple(rows),
        tuple(
            FloatParameter(
                path,
                matrices[path],
                _float_reason(dict(rules), found, path, layer, names),
            )
            for path, layer in layer_of.items()
            if path not in names
        ),
        activation_products,
    )


def _tied(
    found: Mapping[str, str | None],
    matrices: Mapping[str, tuple[int, ...]],
    holders: Mapping[str, str],
    float_products: Iterable[FloatProduct],
) -> dict[str, str]:
    """Maps parameters of modules without an op to the layers that multiply by them.

    A layer that holds no parameter of an operand's size multiplies by the one of that
    size which a module without an op holds, such as an embedding.
    """
    tied = {}
    for layer, operand in dict.fromkeys(float_products):
        if isinstance(operand, str):
            paths = [operand]
        else:
            size = math.prod(operand)
            paths = [p for p, shape in matrices.items() if math.prod(shape) == size]
        if layer not in found or any(holders.get(path) == layer for path in paths):
            continue
        paths = [p for p in paths if p in matrices and holders[p] not in found]
        if len(paths) == 1:
            tied[paths[0]] = layer
    return tied


def of_own_code(report: RulesReport) -> RulesReport:
    """The report of a model whose products outside of layers were found, too."""
    floats = tuple(
        p._replace(reason=NOT_REACHED) if p.reason == WITHOUT_OP else p
        for p in report.float_parameters
    )
    return dataclasses.replace(report, float_parameters=floats)


def is_adapter(parameter: str) -> bool:
    """Whether a name belongs to a LoRA parameter, which products in float read.

    ``nnx.LoRA`` calls its parameters ``lora_a`` and ``lora_b``; Qwix adds
    ``kernel_lora_a`` and ``kernel_lora_b`` to a parameter ``kernel``.
    """
    return parameter.endswith(("lora_a", "lora_b"))


def _float_reason(
    rules: Mapping[str, Recipe | None],
    found: Mapping[str, str | None],
    path: str,
    layer: str,
    products: Container[str],
) -> str:
    """Why a parameter, by which a layer multiplies, is in float."""
    if is_adapter(path):
        return "LoRA"
    if layer in products:
        return AMBIGUOUS
    if layer not in found:
        return WITHOUT_OP
    pattern = found[layer]
    if pattern is None:
        return "no rule for its layer"
    return NOT_REACHED if rules[pattern] is not None else f"rule {pattern!r}"


def warn_of_idle_rules(rules: Pairs, report: RulesReport, *, stacklevel: int) -> None:
    """Warns if rules quantize nothing, or a rule for float keeps no layer in float.

    Most likely a pattern matches nothing, or the layers have ops of their own.

    Args:
      rules: the rules of a model.
      report: what they do.
      stacklevel: the frame that the warning names: 1 is the caller's.
    """
    own = [p for p in report.products if p.rule is None]
    quantized = [
        *(p for p in report.products if p.rule is not None),
        *(p for p in report.activation_products if p.recipe),
    ]
    patterns = [pattern for pattern, recipe in rules if recipe is not None]
    unused = [
        pattern
        for pattern, recipe in rules
        if recipe is None
        and pattern in report.unused_rules
        and not _names_float(pattern, report)
    ]
    if patterns and not quantized:
        effect = "quantize nothing"
        if own:
            effect += " (a layer keeps the op that the model's code gives it)"
    elif unused:
        patterns = unused
        effect = (
            "keep no layer in float, since they match none or an earlier rule matches "
            "first"
        )
    else:
        return
    layers = [*report.unmatched_layers, *report.layers]
    shown = ", ".join(repr(layer) for layer in layers[:_SHOWN_LAYERS]) or "none"
    warnings.warn(
        f"quantize: the patterns {', '.join(map(repr, patterns))} {effect}; a pattern "
        f"matches the whole path of a layer ('.*' takes all), and the layers here are "
        f"{shown}{', ...' * (len(layers) > _SHOWN_LAYERS)} (see the report)",
        stacklevel=stacklevel + 1,
    )


def _names_float(pattern: str, report: RulesReport) -> bool:
    """Whether a pattern names what is in float anyway, such as ``"embed"``."""
    modules = (p.parameter.rpartition("/")[0] for p in report.float_parameters)
    return "@" in pattern or any(re.fullmatch(pattern, module) for module in modules)


def _activations_row(product: ActivationProduct) -> tuple[str, ...]:
    if product.recipe is not None:
        recipe = recipe_name(product.recipe)
        return product.name, _shape(product.shape), _rule(product.rule), recipe
    reason = "no rule names it" if product.rule is None else f"rule {product.rule!r}"
    return product.name, _shape(product.shape), "", f"float: {reason}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _recipe(product: QuantizedParameter) -> str:
    """The recipe, what it ignores, and the layer if the parameter is another's."""
    name = recipe_name(product.recipe)
    if product.ignores_precision:
        name += ", precision ignored"
    if product.layer == product.parameter.rpartition("/")[0]:
        return name
    return f"{name}, in {product.layer or '(root)'}"


def _rule(pattern: str | None) -> str:
    return "own op" if pattern is None else pattern or "''"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
