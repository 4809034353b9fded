"""The jobs of the experiments, each in a process of its own.

    python -m experiments.jobs SIZE WORK RESULTS NAME

does one of them.
"""

import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments import killed, models, runs, studies
from experiments.settings import SIZES, Experiment


@dataclass(frozen=True)
class Job:
    """Work for one process."""

    stage: str  # empty for what only other jobs need
    do: Callable[[], None]  # or continues
    is_done: Callable[[], bool]
    needs: tuple[str, ...] = ()  # the names of the jobs that must be done before


def jobs(experiment: Experiment) -> dict[str, Job]:
    """Returns the jobs of an experiment by name, in the order of their priority."""
    settings, results = experiment.settings, experiment.results

    def of_runs(
        stage: str, groups: dict[str, list[runs.Run]], *needs: str
    ) -> dict[str, Job]:
        return {
            f"{stage}-{name}": Job(
                stage, partial(runs.do, group), partial(runs.are_done, group), needs
            )
            for name, group in groups.items()
        }

    def of_file(stage: str, name: str, do: Callable[..., None], *needs: str) -> Job:
        is_done = (results / f"{name}.json").exists
        return Job(stage, partial(do, experiment), is_done, needs)

    pretraining, base = of_runs("parity", runs.pretraining(experiment)), "parity-bf16-0"
    make = partial(models.make, experiment), partial(models.are_made, experiment)
    found = {
        # Many jobs wait for the models, so these and what they need come first.
        base: pretraining[base],
        "models": Job("", *make, (base,)),
        **pretraining,
        **{
            f"studies-{name}": of_file(
                "studies", f"studies/{name}", partial(studies.run, name), "models"
            )
            for name in settings.studies
        },
        **of_runs("outliers", runs.fine_tuning(experiment), "models"),
        "killed": of_file("killed", "killed", killed.run),
        **of_runs("longer", runs.longer(experiment)),
    }
    return {n: job for n, job in found.items() if job.stage in ("", *settings.stages)}


def choose(jobs: dict[str, Job], wanted: Iterable[str]) -> list[str]:
    """Returns those of the wanted jobs that are not done, and those that they need."""
    names = [name for name in wanted if not jobs[name].is_done()]
    for name in names:  # and those that are added here
        missing = [n for n in jobs[name].needs if not jobs[n].is_done()]
        names += [need for need in missing if need not in names]
    return [name for name in jobs if name in names]


def main(size: str, work: str, results: str, name: str) -> None:
    """Does a job; a signal interrupts it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    jobs(Experiment(SIZES[size], Path(work), Path(results)))[name].do()


if __name__ == "__main__":
    main(*sys.argv[1:])
