"""Runs one study on all models and writes its results.

python -m examples.llama.experiments.studies NAME SIZE WORK RESULTS
"""

import sys
from pathlib import Path

import jax

from examples.llama.experiments import outliers, runs
from examples.llama.experiments.settings import SETTINGS
from examples.llama.experiments.studies import STUDIES
from examples.llama.experiments.studies.subject import load


def main(name: str, size: str, work: Path, results: Path) -> None:
    """Runs a study and writes `results/studies/<name>.json`."""
    settings = SETTINGS[size]
    models = outliers.models(settings, work)
    # A GPU multiplies float32 with 10 bits by default.
    with jax.default_matmul_precision("highest"):
        found = {model: STUDIES[name](load(settings, work, model)) for model in models}
    weights = {model: runs.weights(folder) for model, folder in models.items()}
    result = {"machine": runs.machine(), "weights": weights, "found": found}
    runs.save(result, results / "studies" / f"{name}.json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
