"""Pretraining with each recipe, from the same weights and on the same batches."""

import dataclasses
from pathlib import Path

from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import Settings

# Recipe and seed, the most informative first, in case time runs out.
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


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """Returns the commands of the runs, one process each to separate peak memory."""
    asked = {
        f"{recipe}-{seed}": [_run(settings, work, results, recipe, seed)]
        for recipe, seed in ORDER
    }
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
    data = str(work / "corpus" / "python")
    return Run(
        Config(recipe=recipe, seed=seed, data=data, **settings.pretrain),
        work / "parity" / f"{recipe}-{seed}",
        results / "parity" / f"{recipe}-{seed}.json",
    )
