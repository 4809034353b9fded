"""Does the experiments and draws what came of them.

    python -m examples.llama.experiments all --gpus 4

What is done is not done again, and what was stopped goes on, so that time can be given
in pieces (`--limit`). The results are JSON; `draw` needs nothing else.
"""

import argparse
import re
import signal
import sys
import time
from pathlib import Path

from examples.llama.experiments import (
    corpus,
    found,
    jobs,
    longer,
    outliers,
    page,
    parity,
    pictures,
    runs,
    studies,
)
from examples.llama.experiments.settings import SETTINGS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "EXPERIMENTS.md"
OTHER_PAGE = "tables.md"
STAGES = ("parity", "studies", "outliers", "longer")


def main(argv: list[str] | None = None) -> int:
    """Does what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.experiments",
        description="Does the experiments and draws what came of them.",
    )
    parser.add_argument(
        "what",
        nargs="+",
        choices=(*STAGES, "draw", "all"),
        help="pretraining by each recipe; studies of its bf16 model; fine-tuning of "
        "it with outliers; long runs, and one that is killed; the pictures",
    )
    parser.add_argument("--gpus", type=int, default=0, help="0 (default): on the CPU")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which runs stop"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="leave out what has another name, such as outliers-(bf16|fallback)",
    )
    parser.add_argument("--size", choices=SETTINGS, default="full")
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
        help=f"folder of what is kept (default: {RESULTS.name} beside this module, "
        f"whose tables are in {PAGE.name}; those of others are in its {OTHER_PAGE})",
    )
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stages = [stage for stage in STAGES if {stage, "all"} & set(asked.what)]
    try:
        left = _do(stages, asked) if stages else []
        if left:
            print(f"time is up; not finished: {', '.join(left)}; run this again")
            return 1
        if {"draw", "all"} & set(asked.what):
            print(f"drawn: {', '.join(pictures.draw(asked.results)) or 'nothing'}")
            # The text of PAGE is about the committed results alone.
            committed = asked.results.resolve() == RESULTS.resolve()
            page.fill(PAGE if committed else asked.results / OTHER_PAGE, asked.results)
    except KeyboardInterrupt:
        print("stopped; run this again to go on", file=sys.stderr)
        return jobs.STOPPED
    except (jobs.JobError, found.ResultsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _do(stages: list[str], asked: argparse.Namespace) -> list[str]:
    """Does the stages; returns the names of what is not finished."""
    until = time.monotonic() + asked.limit
    settings, work, results = SETTINGS[asked.size], asked.work, asked.results
    arguments = asked.size, str(work), str(results)
    corpus.prepare(work / "corpus", settings.vocab_size)
    print(f"corpus ready, {until - time.monotonic():.0f} s left", flush=True)

    def chosen(stage: str, commands: dict[str, list[str]]) -> dict[str, list[str]]:
        names = [name for name in commands if re.search(asked.only, name)]
        return {name: commands[name] for name in names if stage in stages}

    needs: dict[str, str] = {}
    commands = chosen("parity", parity.commands(settings, work, results))
    of_models = chosen("studies", studies.commands(*arguments))
    of_models |= chosen("outliers", outliers.commands(settings, work, results))
    # The last is written when all are.
    made = [*outliers.models(settings, work).values(), results / "planted.json"]
    if of_models and not all(path.exists() for path in made):
        # First, for much waits for it; it waits for the run in bf16 alone.
        module = "examples.llama.experiments.outliers"
        commands = {"models": [sys.executable, "-m", module, *arguments]} | commands
        base, run = "parity-bf16-0", parity.base(settings, work, results)
        last = run.out / "checkpoints" / str(run.config.steps)
        if base not in commands and not last.exists():
            base = "base"
            if run.is_done():  # and its model is gone
                run.result.unlink()
            again = runs.command([run], work / "base.runs.json")
            commands = {"base": again} | commands
        needs = {"models": base} | dict.fromkeys(of_models, "models")
    commands |= of_models
    if not (results / "killed.json").exists():
        module = "examples.llama.experiments.killed"
        killed = [sys.executable, "-m", module, *arguments]
        commands |= chosen("longer", {"killed": killed})
    commands |= chosen("longer", longer.commands(settings, work, results))
    return jobs.do(commands, needs, work / "logs", gpus=asked.gpus, until=until)


if __name__ == "__main__":
    sys.exit(main())
