"""Pretraining with each recipe, from the same weights and on the same batches."""

import dataclasses
from pathlib import Path

from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import Settings

# The run whose model is studied.
BASE = "bf16-0"


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """Returns the commands of the runs, a process for each recipe's peak memory.

    The run of `base` has its own process, because other commands wait for its model.
    """
    asked: dict[str, list[Run]] = {}
    for recipe, seed in settings.parity:
        name = f"{recipe}-{seed}"
        run = _run(settings, work, results, recipe, seed)
        asked.setdefault(name if name == BASE else recipe, []).append(run)
    return runs.commands("parity", work, asked)


def base(settings: Settings, work: Path, results: Path) -> Run:
    """Returns the bf16 run whose model is studied.

    Its checkpoint is too large to store with the results, so another machine repeats
    the run. An existing result is then not overwritten.
    """
    run = _run(settings, work, results, "bf16", 0)
    if run.is_done():
        return dataclasses.replace(run, result=work / "base.json")
    return run


def _run(settings: Settings, work: Path, results: Path, recipe: str, seed: int) -> Run:
    options = settings.pretrain | {"data": str(work / "corpus" / "python")}
    if settings.studied and f"{recipe}-{seed}" == BASE:
        options |= {"save_every": settings.pretrain["steps"]}
    return Run(
        Config(recipe=recipe, seed=seed, **options),
        work / "parity" / f"{recipe}-{seed}",
        results / "parity" / f"{recipe}-{seed}.json",
        mesh=settings.mesh,
    )
