"""Runs the experiments and draws their results.

    python -m examples.llama.experiments all --gpus 4

Finished work is not repeated, and stopped work continues, so that the experiments can
run in pieces (`--limit`). The results are JSON files, the only input of `draw`.
"""

import argparse
import math
import re
import signal
import sys
import time
from pathlib import Path

from examples.llama import atomic, mesh
from examples.llama.experiments import (
    corpus,
    jobs,
    longer,
    outliers,
    page,
    parity,
    pictures,
    result_files,
    runs,
    studies,
)
from examples.llama.experiments.result_files import ResultsError
from examples.llama.experiments.settings import SETTINGS

RESULTS = Path(__file__).parent / "results"
_EVIDENCE = Path(__file__).parents[3] / "docs/evidence"
# The folders of the committed results, and the pages that describe them.
PAGES = {
    RESULTS: _EVIDENCE / "experiments.md",
    RESULTS / "quarter": _EVIDENCE / "outliers.md",
    RESULTS / "seeds": _EVIDENCE / "seeds.md",
    RESULTS / "larger": _EVIDENCE / "larger.md",
    RESULTS / "larger-on-four": _EVIDENCE / "larger-on-four.md",
}
OTHER_PAGE = "tables.md"
STAGES = ("parity", "studies", "outliers", "longer")

Commands = dict[str, list[str]]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = _parser()
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    possible = STAGES if SETTINGS[asked.size].studied else STAGES[:1]
    if absent := {*asked.what} & {*STAGES} - {*possible}:
        parser.error(
            f"--size {asked.size} has no {' and no '.join(sorted(absent))}, only "
            f"{STAGES[0]}"
        )
    stages = [stage for stage in possible if {stage, "all"} & set(asked.what)]
    try:
        left = _run(stages, asked) if stages else []
        if left:
            print(f"time is up; not finished: {', '.join(left)}; run this again")
            return 1
        if {"draw", "all"} & set(asked.what):
            _draw(asked.results)
    except KeyboardInterrupt:
        print("stopped; run this again to continue", file=sys.stderr)
        return jobs.STOPPED
    except (jobs.JobError, ResultsError, OSError) as error:  # OSError names its file
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.experiments",
        description="Runs the experiments and draws their results.",
    )
    parser.add_argument(
        "what",
        nargs="+",
        choices=(*STAGES, "draw", "all"),
        help="parity: pretraining with each recipe; studies: studies of its bf16 "
        "model; outliers: fine-tuning of that model with outliers; longer: long runs, "
        "and one that is killed and resumed; draw: the pictures and tables",
    )
    parser.add_argument(
        "--gpus",
        type=_number_of_gpus,
        default=0,
        help="number of GPUs; 0 (default) uses the CPU",
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=1e9,
        help="seconds after which runs are stopped; the text is made whole first",
    )
    parser.add_argument(
        "--only",
        type=_expression,
        default="",
        metavar="REGEX",
        help="skip commands with other names, as in outliers-(bf16|fallback)",
    )
    parser.add_argument(
        "--size", choices=SETTINGS, default="full", help="size (default: %(default)s)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/experiments"),
        help="folder of the corpus, the runs and their logs (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help=f"folder of the results (default: {RESULTS.name} beside this module; the "
        "committed folders have their tables in docs/evidence, others in "
        f"{OTHER_PAGE})",
    )
    return parser


def _number_of_gpus(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes an integer from 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0.0:
        raise argparse.ArgumentTypeError(f"takes a positive number, got {text!r}")
    return seconds


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"takes a regular expression, got {text!r}: {error}"
        ) from error


def _draw(results: Path) -> None:
    if not results.is_dir():
        raise ResultsError(f"there is no folder {results} with results to draw")
    described = PAGES.get(results.resolve(), results / OTHER_PAGE)
    names = page.places(described)
    print(f"drawn: {', '.join(pictures.draw(results, names)) or 'nothing'}")
    page.fill(described, results)


def _run(stages: list[str], asked: argparse.Namespace) -> list[str]:
    """Runs the stages; returns the names of unfinished commands."""
    until = time.monotonic() + asked.limit
    settings, work, results = SETTINGS[asked.size], asked.work, asked.results
    corpus.prepare(work / "corpus", settings.vocab_size)
    _note_corpus(work / "corpus" / corpus.FACTS, results / result_files.CORPUS)
    print(f"corpus ready, {until - time.monotonic():.0f} s left", flush=True)

    def chosen(stage: str, commands: Commands) -> Commands:
        if stage not in stages:
            return {}
        known.extend(commands)
        return {name: commands[name] for name in commands if asked.only.search(name)}

    arguments = asked.size, str(work), str(results)
    known: list[str] = []
    commands = chosen("parity", parity.commands(settings, work, results))
    on_models = chosen("studies", studies.commands(*arguments))
    on_models |= chosen("outliers", outliers.commands(settings, work, results))
    needs: dict[str, str] = {}
    # Planting writes this file last.
    made = [*outliers.models(settings, work).values(), results / "planted.json"]
    if on_models and not all(path.exists() for path in made):
        first = _make_models(asked, commands)
        # They start first, because many commands wait for the models. The models wait
        # for the bf16 run only.
        commands = first | commands
        base = "base" if "base" in first else "parity-bf16-0"
        needs = {"models": base} | dict.fromkeys(on_models, "models")
    commands |= on_models
    if not (results / "killed.json").exists():
        killed = [sys.executable, "-m", "examples.llama.experiments.killed", *arguments]
        commands |= chosen("longer", {"killed": killed})
    commands |= chosen("longer", longer.commands(settings, work, results))
    if known and not commands:
        print(f"--only {asked.only.pattern} matches none of what is left: {known}")
    return jobs.do(
        commands,
        needs,
        work / "logs",
        gpus=asked.gpus,
        until=until,
        gpus_each=math.prod(mesh.parse(settings.mesh).values()),
    )


def _note_corpus(facts: Path, noted: Path) -> None:
    """Copies the facts of the text to the results.

    Raises:
        ResultsError: The results belong to another text.
    """
    if not noted.exists():
        noted.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(noted, facts.read_text())
    elif noted.read_text() != facts.read_text():
        raise ResultsError(
            f"the results in {noted.parent} belong to another text: {noted} differs "
            f"from {facts}; choose another folder with --results"
        )


def _make_models(asked: argparse.Namespace, commands: Commands) -> Commands:
    """The command that plants outliers and, if the bf16 model is gone, its run."""
    settings, work, results = SETTINGS[asked.size], asked.work, asked.results
    module = "examples.llama.experiments.outliers"
    arguments = asked.size, str(work), str(results)
    models = {"models": [sys.executable, "-m", module, *arguments]}
    run = parity.base(settings, work, results)
    last = run.out / "checkpoints" / str(run.config.steps)
    if "parity-bf16-0" in commands or last.exists():
        return models
    if run.is_done():  # but its checkpoint is gone
        run.result.unlink()
    return {"base": runs.command([run], work / "base.runs.json")} | models


if __name__ == "__main__":
    sys.exit(main())
