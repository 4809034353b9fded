"""Pretraining with five times the steps, a high learning rate and no clipping."""

from pathlib import Path

from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import Settings


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """Returns the commands of the runs of the recipes of `parity`, one process each."""
    options = settings.pretrain | settings.longer
    data = str(work / "corpus" / "python")
    asked = {
        recipe: Run(
            Config(recipe=recipe, data=data, **options),
            work / "longer" / recipe,
            results / "longer" / f"{recipe}.json",
        )
        for recipe in dict.fromkeys(recipe for recipe, _ in settings.parity)
    }
    return runs.commands("longer", work, {name: [run] for name, run in asked.items()})
