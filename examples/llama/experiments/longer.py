"""Pretraining with five times the steps and no clipping, at high learning rates."""

from pathlib import Path

from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import Settings


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """Returns the commands of the runs of the recipes of `parity`, one process each.

    The first learning rate comes first, in case time runs out.
    """
    options = settings.pretrain | settings.longer
    data = str(work / "corpus" / "python")
    asked = {
        (name := f"{recipe}-{lr:g}"): Run(
            Config(recipe=recipe, data=data, **options | {"lr": lr}),
            work / "longer" / name,
            results / "longer" / f"{name}.json",
        )
        for lr in settings.longer_lrs
        for recipe in dict.fromkeys(recipe for recipe, _ in settings.parity)
    }
    return runs.commands("longer", work, {name: [run] for name, run in asked.items()})
