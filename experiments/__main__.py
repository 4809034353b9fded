"""Runs the experiments and draws their results.

    python -m experiments all --gpus 4

Finished work is not repeated, and stopped work continues, so that the experiments can
run in pieces. The results are JSON files, the only input of `draw`.
"""

import argparse
import signal
import sys
from fnmatch import fnmatch
from pathlib import Path

from examples.llama import atomic
from experiments import corpus, page, processes, result_files
from experiments.jobs import choose, jobs
from experiments.result_files import ResultsError
from experiments.settings import FULL, SIZES, Experiment

STAGES = FULL.stages


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = _parser()
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    possible = SIZES[asked.size].stages
    if absent := [s for s in STAGES if s in asked.what and s not in possible]:
        parser.error(
            f"--size {asked.size} has no {' and no '.join(absent)}, only "
            f"{', '.join(possible)}"
        )
    stages = [stage for stage in possible if {stage, "all"} & set(asked.what)]
    try:
        if stages:
            _run(stages, asked)
        if {"draw", "all"} & set(asked.what):
            drawn = page.draw(asked.results)
            print(f"drawn: {', '.join(drawn) or 'nothing'}")
    except KeyboardInterrupt:
        print("stopped; run this again to continue", file=sys.stderr)
        return 130
    except (processes.JobError, ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # OSError names its file
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Runs the experiments and draws their results.",
    )
    add = parser.add_argument
    add(
        "what",
        nargs="+",
        choices=(*STAGES, "draw", "all"),
        help="parity: pretraining with each recipe; studies: studies of its bf16 "
        "model; outliers: fine-tuning of that model with outliers; longer: long runs; "
        "killed: a run that is killed and resumed; draw: the pictures and tables",
    )
    add(
        "--gpus",
        type=int,
        choices=range(65),
        metavar="N",
        default=0,
        help="number of GPUs; 0 (default) uses the CPU",
    )
    add(
        "--only",
        default="*",
        metavar="PATTERN",
        help="skip jobs with other names than, for example, 'outliers-fallback*'",
    )
    add("--size", choices=SIZES, default="full", help="size (default: %(default)s)")
    add(
        "--work",
        type=Path,
        default=Path("runs/experiments"),
        help="folder of the corpus, the runs and their logs (default: %(default)s)",
    )
    add(
        "--results",
        type=Path,
        help=f"folder of the results, where draw writes {page.OTHER_PAGE} (default: "
        "the committed results of this size, whose tables are in docs/evidence)",
    )
    return parser


def _run(stages: list[str], asked: argparse.Namespace) -> None:
    """Runs the jobs of the stages that are not done."""
    results = asked.results or page.RESULTS / asked.size
    experiment = Experiment(SIZES[asked.size], asked.work, results)
    corpus.prepare(experiment.corpus, experiment.settings.vocab_size)
    _note_corpus(experiment.corpus / corpus.FACTS, results / result_files.CORPUS)
    known = jobs(experiment)
    left = choose(known, [n for n in known if known[n].stage in stages])
    names = choose(known, [name for name in left if fnmatch(name, asked.only)])
    if left and not names:
        print(f"--only {asked.only} matches none of what is left: {left}")
    job = [sys.executable, "-m", "experiments.jobs"]
    job += [asked.size, str(asked.work), str(results)]
    processes.do(
        {name: [*job, name] for name in names},
        {name: known[name].needs for name in names},
        asked.work / "logs",
        gpus=asked.gpus,
        gpus_each=experiment.settings.gpus_each,
    )


def _note_corpus(facts: Path, noted: Path) -> None:
    """Copies the facts of the text to the results.

    Raises:
        ResultsError: The results belong to another text.
    """
    if not noted.exists():
        noted.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(noted, facts.read_text(encoding="utf-8"))
    elif noted.read_text(encoding="utf-8") != facts.read_text(encoding="utf-8"):
        raise ResultsError(
            f"the results in {noted.parent} belong to another text: {noted} differs "
            f"from {facts}; choose another folder with --results"
        )


if __name__ == "__main__":
    sys.exit(main())
