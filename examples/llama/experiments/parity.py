"""Pretraining by each recipe: the same weights, the same data in the same order."""

import dataclasses
from pathlib import Path

from examples.llama.config import Config
from examples.llama.experiments import runs
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


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """The runs, each in a process of its own, so that its peak memory is its own."""
    commands = {
        f"parity-{recipe}-{seed}": runs.command(
            [_run(settings, work, results, recipe, seed)],
            work / "parity" / f"{recipe}-{seed}.json",
        )
        for recipe, seed in ORDER
    }
    return {name: command for name, command in commands.items() if command}


def base(settings: Settings, work: Path, results: Path) -> Run:
    """The bf16 run whose model is studied: one of `commands`, with its result.

    Its checkpoint is too large to be kept with the results, so on another machine it is
    done again. The result that is there stays as it is then.
    """
    run = _run(settings, work, results, "bf16", 0)
    if run.is_done():
        return dataclasses.replace(run, result=work / "base.json")
    return run


def _run(settings: Settings, work: Path, results: Path, recipe: str, seed: int) -> Run:
    return Run(
        Config(
            recipe=recipe,
            seed=seed,
            data=str(work / "corpus" / "python"),
            **settings.pretrain,
        ),
        work / "parity" / f"{recipe}-{seed}",
        results / "parity" / f"{recipe}-{seed}.json",
    )
