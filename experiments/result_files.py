"""Reads and writes the JSON results of the experiments."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.llama import atomic
from experiments.settings import RECIPES
from fbq_jax.bench import results

Json = dict[str, Any]

CORPUS = "corpus.json"  # the facts of the text


class ResultsError(ValueError):
    """Results are damaged, or belong to different texts, models or options."""


def save(result: Any, file: Path) -> None:
    """Writes JSON with floats of eight digits, about the precision of float32."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), separators=(",", ":"))
    atomic.write(file, text.replace(',"', ',\n"') + "\n")  # one line per list


def save_rows(rows: Iterable[Json], file: Path) -> None:
    """Prints and writes rows, each as soon as it is there."""
    facts = {"device": jax.devices()[0].device_kind, "versions": results.versions()}
    found: list[Json] = []
    for row in rows:
        shown = {k: v for k, v in row.items() if isinstance(v, str | int | float)}
        print(json.dumps(shown), flush=True)
        found.append(row)
        save(facts | {"rows": found}, file)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def read(file: Path) -> Json:
    """Reads a JSON file; raises ResultsError if it is damaged."""
    try:
        content: Json = json.loads(file.read_bytes())
    except ValueError as error:
        raise ResultsError(
            f"{file} is damaged ({error}): restore it, or delete it to run it again"
        ) from error
    return content


def one(results: Path, name: str) -> Json:
    """Reads `<name>.json`; empty if it does not exist."""
    file = results / f"{name}.json"
    return read(file) if file.exists() else {}


def runs(results: Path, stage: str) -> dict[str, Json]:
    """Reads the runs of a stage with one of `RECIPES` by name, bf16 first.

    Raises:
        ResultsError: They have other texts, or other models than `planted.json`.
    """
    files = sorted(
        (results / stage).glob("*.json"),
        key=lambda file: (not file.stem.startswith("bf16"), file.stem),
    )
    found = {file: read(file) for file in files}
    first: Json | None = None
    for file, run in found.items():
        corpus = run["options"]["corpus"]
        first = first or corpus
        if corpus != first:
            raise ResultsError(
                f"{file} belongs to another text than {files[0]}: {corpus}, not "
                f"{first}; keep the runs of one text"
            )
        if "model" in run:
            _check_model(results, file, run["model"], run["weights"])
    return {
        file.stem: run
        for file, run in found.items()
        if run["options"]["recipe"] in RECIPES
    }


def study(results: Path, name: str) -> Json:
    """Reads the result of a study by model; empty if the study has not run.

    Raises:
        ResultsError: The models are not those in `planted.json`.
    """
    result = one(results, f"studies/{name}")
    for model, weights in result.get("weights", {}).items():
        _check_model(results, results / f"studies/{name}.json", model, weights)
    return result.get("found", {})


def _check_model(results: Path, file: Path, model: str, weights: str) -> None:
    planted = one(results, "planted").get(model, {}).get("weights")
    if weights != planted:
        raise ResultsError(
            f"{file} belongs to another model {model} than {results / 'planted.json'}: "
            f"its weights have the SHA-256 {weights}, not {planted}; keep the results "
            "of one model"
        )


def last_val_loss(run: Json) -> float:
    """Returns the last validation loss; NaN if there is none or it is not finite."""
    values = list(run["val_loss"].values())
    if "diverged" in run or not values or values[-1] is None:
        return float("nan")
    return values[-1]


def losses_by_model(runs: dict[str, Json]) -> dict[str, dict[str, dict[int, float]]]:
    """Returns the last losses of completed runs by model, recipe and seed."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs.values():
        if run["done"]:
            by_recipe = losses.setdefault(run["model"], {})
            seeds = by_recipe.setdefault(run["options"]["recipe"], {})
            seeds[run["options"]["seed"]] = last_val_loss(run)
    return losses


def differences_from_bf16(
    losses: dict[str, dict[int, float]], recipe: str
) -> np.ndarray:
    """Returns a recipe's losses minus bf16's, for each seed that both have.

    The losses are those of one model, by recipe and seed. Runs with the same seed read
    the same batches, so most of the variation between seeds cancels.
    """
    own, bf16 = losses.get(recipe, {}), losses.get("bf16", {})
    return np.array([own[seed] - bf16[seed] for seed in sorted(own.keys() & bf16)])
