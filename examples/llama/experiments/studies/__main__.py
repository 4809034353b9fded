"""Runs one study on all models and writes its results.

python -m examples.llama.experiments.studies NAME SIZE WORK RESULTS
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from examples.llama.experiments import outliers, runs
from examples.llama.experiments.settings import SETTINGS
from examples.llama.experiments.studies import (
    NAMES,
    blocks,
    criteria,
    error,
    gradients,
    perplexity,
    start,
)
from examples.llama.experiments.studies.subject import Subject, load

STUDIES: dict[str, Callable[[Subject], Any]] = {
    "error": error.study,
    "criteria": criteria.study,
    "operands": gradients.operands,
    "passes": gradients.passes,
    "nonlinear": gradients.nonlinear,
    "perplexity": perplexity.study,
    "blocks": blocks.study,
    "start": start.study,
}
assert tuple(STUDIES) == NAMES


def main(name: str, size: str, work: Path, results: Path) -> None:
    """Runs a study and writes `results/studies/<name>.json`."""
    settings = SETTINGS[size]
    # A GPU multiplies float32 with 10 bits by default.
    with jax.default_matmul_precision("highest"):
        found = {
            model: STUDIES[name](load(settings, work, model))
            for model in outliers.models(settings, work)
        }
    models = outliers.models(settings, work).items()
    weights = {model: runs.weights(folder) for model, folder in models}
    result = {"machine": runs.machine(), "weights": weights, "found": found}
    runs.save(result, results / "studies" / f"{name}.json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
