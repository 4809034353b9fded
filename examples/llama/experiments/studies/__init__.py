"""Studies of quantization errors in the matrix products of a trained model."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.llama.experiments.studies import (
    blocks,
    by_recipe,
    criteria,
    error,
    gradients,
    perplexity,
    start,
)
from examples.llama.experiments.studies.subject import Subject

STUDIES: dict[str, Callable[[Subject], Any]] = {
    "error": error.study,
    "criteria": criteria.study,
    "operands": gradients.operands,
    "passes": gradients.passes,
    "nonlinear": gradients.nonlinear,
    "perplexity": perplexity.study,
    "recipes": by_recipe.study,
    "blocks": blocks.study,
    "start": start.study,
}


def commands(size: str, work: str, results: str) -> dict[str, list[str]]:
    """Returns the commands of the studies, one process each."""
    module = "examples.llama.experiments.studies"
    return {
        f"study-{name}": [sys.executable, "-m", module, name, size, work, results]
        for name in STUDIES
        if not (Path(results) / "studies" / f"{name}.json").exists()
    }
