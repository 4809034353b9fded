"""Reads the JSON results of the experiments."""

import json
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]

CORPUS = "corpus.json"  # the facts of the text


class ResultsError(ValueError):
    """Results are damaged, or belong to different texts, models or options."""


def runs(results: Path, stage: str) -> dict[str, Json]:
    """Reads the runs of a stage by name, bf16 first.

    Raises:
        ResultsError: The runs read different texts, or started from other models than
            those in `planted.json`.
    """
    files = sorted(
        (results / stage).glob("*.json"),
        key=lambda file: (not file.stem.startswith("bf16"), file.stem),
    )
    results_by_file = {file: read(file) for file in files}
    corpora = {file: run["options"]["corpus"] for file, run in results_by_file.items()}
    for file, corpus in corpora.items():
        if corpus != corpora[files[0]]:
            raise ResultsError(
                f"{file} belongs to another text than {files[0]}: {corpus}, not "
                f"{corpora[files[0]]}; keep the runs of one text"
            )
    for file, run in results_by_file.items():
        if "model" in run:
            _check_model(results, file, run["model"], run["weights"])
    return {file.stem: run for file, run in results_by_file.items()}


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


def one(results: Path, name: str) -> Json:
    """Reads `<name>.json`; empty if it does not exist."""
    file = results / f"{name}.json"
    return read(file) if file.exists() else {}


def read(file: Path) -> Json:
    """Reads a JSON file.

    Raises:
        ResultsError: The file is damaged.
    """
    try:
        content: Json = json.loads(file.read_text())
    except ValueError as error:
        raise ResultsError(
            f"{file} is damaged ({error}): restore it, or delete it to run it again"
        ) from error
    return content


def projection(layer: str) -> str:
    """Returns the name of a projection from the path of its state."""
    return layer.removeprefix("layers/").removesuffix("/dense")


def last_val_loss(run: Json) -> float:
    """Returns the last validation loss; NaN if there is none or it is not finite."""
    values = list(run["val_loss"].values())
    if "diverged" in run or not values or values[-1] is None:
        return float("nan")
    return values[-1]


def labels(runs: dict[str, Json]) -> dict[str, str]:
    """Returns the names of runs by themselves, with their devices if these differ."""
    devices = {name: run["machine"]["device"] for name, run in runs.items()}
    if len({*devices.values()}) <= 1:
        return {name: name for name in runs}
    return {name: f"{name} ({device})" for name, device in devices.items()}


def losses_by_time(run: Json) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of training before each validation, and its loss."""
    options = run["options"]
    seconds_per_step = options["batch"] * options["seq"] / run["tokens_per_s"]
    steps = np.array(list(map(int, run["val_loss"])))
    return steps * seconds_per_step, np.array(list(run["val_loss"].values()), float)


def losses_by_model(runs: dict[str, Json]) -> dict[str, dict[str, dict[int, float]]]:
    """Returns the last validation losses of completed fine-tuning runs.

    Returns:
        The losses by model, recipe and seed.
    """
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs.values():
        if run["done"]:
            by_recipe = losses.setdefault(run["model"], {})
            by_seed = by_recipe.setdefault(run["options"]["recipe"], {})
            by_seed[run["options"]["seed"]] = last_val_loss(run)
    return losses


def differences_from_bf16(
    losses: dict[str, dict[int, float]], recipe: str
) -> np.ndarray:
    """Returns a recipe's losses minus bf16's, for each seed that both have.

    Runs with the same seed read the same batches, so most of the variation between
    seeds cancels.

    Args:
        losses: The losses of one model, by recipe and seed.
        recipe: The recipe to compare with bf16.
    """
    own, bf16 = losses.get(recipe, {}), losses.get("bf16", {})
    return np.array([own[seed] - bf16[seed] for seed in sorted(own.keys() & bf16)])
