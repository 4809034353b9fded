"""Pretraining with five times the steps, a high learning rate and no clipping."""

from pathlib import Path

from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import Settings

ORDER = (
    "bf16",
    "fallback",
    "block",
    "jetfire",
    "rowwise",
    "per_tensor",
    "fp8_delayed",
    "switchback",
    "fallback_rowwise_bwd",
)


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """Returns the commands of the runs, one process each."""
    options = settings.pretrain | settings.longer
    data = str(work / "corpus" / "python")
    asked = {
        recipe: Run(
            Config(recipe=recipe, data=data, **options),
            work / "longer" / recipe,
            results / "longer" / f"{recipe}.json",
        )
        for recipe in ORDER
    }
    return runs.commands("longer", work, {name: [run] for name, run in asked.items()})
