"""Studies of quantization errors in the matrix products of a trained model."""

import sys
from pathlib import Path

NAMES = (
    "error",
    "criteria",
    "operands",
    "passes",
    "nonlinear",
    "perplexity",
    "blocks",
    "start",
)


def commands(size: str, work: str, results: str) -> dict[str, list[str]]:
    """Returns the commands of the studies, one process each."""
    module = "examples.llama.experiments.studies"
    return {
        f"study-{name}": [sys.executable, "-m", module, name, size, work, results]
        for name in NAMES
        if not (Path(results) / "studies" / f"{name}.json").exists()
    }
