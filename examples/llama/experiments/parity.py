"""Pretraining by each recipe: the same weights, the same data in the same order."""

from pathlib import Path

from examples.llama.config import RECIPES, Config
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import Settings

# Recipe and seed, the most telling first: time may be up before the last.
ORDER = (
    ("bf16", 0),
    ("fallback", 0),
    ("block", 0),
    ("jetfire", 0),
    ("bf16", 1),
    ("rowwise", 0),
    ("fp8_delayed", 0),
    ("per_tensor", 0),
    ("fallback_rowwise_bwd", 0),
    ("switchback", 0),
)


def jobs(settings: Settings, work: Path, results: Path) -> dict[str, list[Run]]:
    """The runs, each in a process of its own, so that its peak memory is its own."""
    return {
        f"{recipe}-{seed}": [
            Run(
                Config(
                    recipe=recipe,
                    seed=seed,
                    data=str(work / "corpus" / "python"),
                    **settings.pretrain,
                ),
                work / "parity" / f"{recipe}-{seed}",
                results / "parity" / f"{recipe}-{seed}.json",
            )
        ]
        for recipe, seed in ORDER
        if recipe in RECIPES
    }
