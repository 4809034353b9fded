"""`--recipe auto`: rules for the layers of a run, and what they were found by."""

import dataclasses
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax

from examples.llama import mesh
from examples.llama.config import Config
from examples.llama.errors import UserError, writing
from examples.llama.model import Llama
from fbq_jax import RulesDot, choose_recipes
from fbq_jax.choice import ChoiceReport

RECIPES_FILE = "recipes.json"


class _Loss(Llama):
    """The loss of a model on tokens, with the paths of the model's layers."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Any:  # type: ignore[override]
        return super().__call__(tokens[:, :-1], targets=tokens[:, 1:])


def choose(model: Llama, params: Any, tokens: jax.Array) -> ChoiceReport:
    """Chooses recipes by the gradient of a float model on tokens [B, S+1].

    With recipes, it is measured as a run trains: layers fuse, and save ``saved_bits``.
    """
    if mesh.size() > 1:
        raise UserError(
            "auto takes one device: there it prints rules, which --recipe takes, too"
        )
    loss = _Loss(dataclasses.replace(model.config, saved_bits=None), None)

    def quantize(_: _Loss, rules: Any, *__: Any) -> tuple[_Loss, None]:
        return _Loss(model.config, RulesDot(rules)), None

    options: Any = {"loss": lambda loss: loss, "layers": "layers.*"}
    options["quantize"] = quantize
    return choose_recipes(loss, {"params": params}, tokens, **options)[1]


def with_rules(config: Config, report: ChoiceReport) -> Config:
    """The options of a run with the recipe, or the rules, of a report."""
    names = {layer.layer: layer.chosen or "bf16" for layer in report.layers}
    ((most, _),) = Counter(names.values()).most_common(1)
    others = [f"{path}={name}" for path, name in names.items() if name != most]
    recipe = ",".join([*others, f".*={most}"]) if others else most
    return dataclasses.replace(config, recipe=recipe)


def write(report: ChoiceReport, out: Path) -> None:
    """Writes a report to the folder of a run, and a picture of it."""
    with writing(out):
        report.save(out / RECIPES_FILE)
        report.draw().savefig((out / RECIPES_FILE).with_suffix(".png"), dpi=150)


def resume(
    out: Path, model: Llama, params: Any, tokens: jax.Array
) -> ChoiceReport | None:
    """Returns the report of a run that goes on, which can look at its layers again.

    None if the run has no report, or now has several devices.
    """
    if not (out / RECIPES_FILE).exists():
        return None
    try:
        stored = ChoiceReport.load(out / RECIPES_FILE)
    except ValueError as error:
        raise UserError(str(error)) from error
    if mesh.size() > 1:
        if mesh.is_first():
            print("note: on several devices, no look is taken at the layers of auto")
        return None
    return dataclasses.replace(stored, look=choose(model, params, tokens).look)


def check(report: ChoiceReport, params: Any, tokens: jax.Array) -> list[str]:
    """Looks at the layers again; returns warnings of those that left their budget."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        report.check({"params": params}, tokens)
    return [str(warning.message) for warning in found]
