"""What was found: the JSON of the results, read."""

import json
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]


class ResultsError(ValueError):
    """Results that cannot stand beside each other: of other texts, or other models."""


def runs(results: Path, stage: str) -> dict[str, Json]:
    """The runs of a stage by name, those in bf16 first; none if there are none.

    Raises:
        ResultsError: They have read different texts, or did not start from the models
            that `planted.json` tells of.
    """
    files = sorted(
        (results / stage).glob("*.json"),
        key=lambda file: (not file.stem.startswith("bf16"), file.stem),
    )
    found = {file: json.loads(file.read_text()) for file in files}
    corpora = {file: run["options"]["corpus"] for file, run in found.items()}
    for file, corpus in corpora.items():
        if corpus != corpora[files[0]]:
            raise ResultsError(
                f"{file} is of another text than {files[0]}: {corpus}, not "
                f"{corpora[files[0]]}; keep the runs of one of them"
            )
    for file, run in found.items():
        if "model" in run:
            _check_model(results, file, run["model"], run["weights"])
    return {file.stem: run for file, run in found.items()}


def study(results: Path, name: str) -> Json:
    """What a study found of each model; nothing if it was not done.

    Raises:
        ResultsError: They are not the models that `planted.json` tells of.
    """
    result = one(results, f"studies/{name}")
    for model, weights in result.get("weights", {}).items():
        _check_model(results, results / f"studies/{name}.json", model, weights)
    return result.get("found", {})


def _check_model(results: Path, file: Path, model: str, weights: str) -> None:
    planted = one(results, "planted").get(model, {}).get("weights")
    if weights != planted:
        raise ResultsError(
            f"{file} is of another model {model} than {results / 'planted.json'}: its "
            f"weights have the SHA-256 {weights}, not {planted}; keep those of one"
        )


def one(results: Path, name: str) -> Json:
    """A result that is one file; nothing if there is none."""
    file = results / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def projection(layer: str) -> str:
    """The name of a projection, of the path of its state."""
    return layer.removeprefix("layers/").removesuffix("/dense")


def last_val_loss(run: Json) -> float:
    """The last validation loss; NaN where it was not finite, or there was none."""
    values = list(run["val_loss"].values())
    if "diverged" in run or not values or values[-1] is None:
        return float("nan")
    return values[-1]


def losses_by_time(run: Json) -> tuple[np.ndarray, np.ndarray]:
    """Validation losses, and after how many seconds of training steps each was."""
    options = run["options"]
    seconds_a_step = options["batch"] * options["seq"] / run["tokens_per_s"]
    steps = np.array(list(map(int, run["val_loss"])))
    return steps * seconds_a_step, np.array(list(run["val_loss"].values()), float)


def by_model_and_recipe(
    runs: dict[str, Json],
) -> dict[str, dict[str, dict[int, float]]]:
    """The last validation losses of fine-tuning runs that are done, by their seeds."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs.values():
        if run["done"]:
            of_recipe = losses.setdefault(run["model"], {})
            of_seed = of_recipe.setdefault(run["options"]["recipe"], {})
            of_seed[run["options"]["seed"]] = last_val_loss(run)
    return losses


def to_bf16(losses: dict[str, dict[int, float]], recipe: str) -> np.ndarray:
    """A recipe's losses of a model minus bf16's, of each seed that both have.

    Runs of a seed have the same batches, so that most of what differs between seeds is
    not in it.
    """
    of_recipe, of_bf16 = losses.get(recipe, {}), losses.get("bf16", {})
    seeds = sorted(of_recipe.keys() & of_bf16.keys())
    return np.array([of_recipe[seed] - of_bf16[seed] for seed in seeds])
