"""The tables of the experiments about studies."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama.experiments import result_files
from examples.llama.experiments.markdown import table
from examples.llama.experiments.studies import criteria, error, gradients
from examples.llama.experiments.studies.perplexity import BLOCK_SIDES
from fbq_jax import recipes

_LOW, _HIGH = recipes.fallback.target_rate


def errors(results: Path) -> str:
    """The error of the input of `down`, by bits."""
    return _by_model(results, "error", error.PLAIN, "down")


def output_distances(results: Path) -> str:
    """The error of the output of `down`, by fallback rate and criterion."""
    return _by_model(results, "criteria", criteria.RATES, "down")


def operands(results: Path) -> str:
    """The error of the gradient, by bits of each operand."""
    return _by_model(results, "operands", gradients.BITS)


def passes(results: Path) -> str:
    """The error of the gradient, by fallback rate and by where fallback applies."""
    return _by_model(results, "passes", gradients.RATES)


def nonlinear(results: Path) -> str:
    """The error of the gradient, by the bits that norms and gates save."""
    return _by_model(results, "nonlinear", gradients.SAVED_BITS)


def _by_model(results: Path, name: str, columns: Iterable[Any], *path: str) -> str:
    """A table of a study that measured a list of errors for each model and variant."""
    rows = []
    for model, found in result_files.study(results, name).items():
        for key in path:
            found = found[key]
        variants = found if isinstance(found, dict) else {"": found}
        for variant, values in variants.items():
            rows.append([model, variant, *(f"{value:.1e}" for value in values)])
    return table(("model", "", *map(str, columns)), rows)


def perplexity(results: Path) -> str:
    """The perplexity by block size, beside the perplexity in float32."""
    rows = [
        [model, kind, *(f"{value:.6g}" for value in (found["float"], *found[kind]))]
        for model, found in result_files.study(results, "perplexity").items()
        for kind in ("block", "fallback")
    ]
    return table(("model", "", "float32", *map(str, BLOCK_SIDES)), rows)


def by_recipe(results: Path) -> str:
    """The perplexity and the error of the gradient, by recipe."""
    found = result_files.study(results, "recipes")
    rows = [
        [name, *(f"{of[name]['perplexity']:.5g}" for of in found.values())]
        + [f"{of[name]['gradient']:.1e}" for of in found.values()]
        for name in next(iter(found.values()), {})
    ]
    head = (
        f"{what}, {model}" for what in ("perplexity", "gradient") for model in found
    )
    return table(("recipe", *head), rows)


def blocks(results: Path) -> str:
    """The fallback rate, and its concentration in the busiest blocks of channels."""
    rows = [
        [model, name, *_concentration(layers)]
        for model, found in result_files.study(results, "blocks").items()
        for name, layers in found.items()
    ]
    busiest = "of these in the busiest tenth of the blocks of channels"
    return table(("model", "input of", "fall back", busiest), rows)


def _concentration(layers: list[list[str]]) -> list[str]:
    """The cells of a row, from maps of the blocks of each layer."""
    cells = np.array([[list(map(int, line)) for line in layer] for layer in layers])
    # Each layer is sorted before the average, because its busiest columns differ.
    columns = np.sort(cells.mean(axis=1))[:, ::-1].mean(axis=0)
    width = max(1, len(columns) // 10)
    rate = f"{cells.mean():.1%}"
    if not columns.any():
        return [rate]
    share = columns[:width].sum() / columns.sum()
    return [rate, f"{share:.1%} in {width} of {len(columns)}"]


def start(results: Path) -> str:
    """The number of training forwards until the rate first is in its range."""
    found = result_files.study(results, "start").get("trained", {})

    def forwards(rates: list[float]) -> str:
        inside = [_LOW <= rate <= _HIGH for rate in rates]
        return str(inside.index(True) + 1) if True in inside else f"over {len(rates)}"

    rows = [[name, forwards(values["rate"])] for name, values in found.items()]
    head = "start / first batch's threshold", "forwards until the rate is in the range"
    return table(head, rows)
