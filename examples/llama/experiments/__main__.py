"""Does the experiments and draws what came of them.

    python -m examples.llama.experiments all --gpus 4

What is done is not done again, and what was stopped goes on, so that time can be given
in pieces (`--limit`). The results are JSON; `draw` needs nothing else.
"""

import argparse
import sys
import time
from pathlib import Path

from examples.llama.config import RECIPES
from examples.llama.experiments import corpus, jobs, parity
from examples.llama.experiments.settings import SETTINGS

RESULTS = Path(__file__).parent / "results"


def main(argv: list[str] | None = None) -> int:
    """Does what the command line asks for; returns the exit status."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.experiments", description=__doc__.split("\n")[0]
    )
    parser.add_argument("what", choices=("parity",))
    parser.add_argument("--gpus", type=int, default=0, help="0 (default): on the CPU")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which runs stop"
    )
    parser.add_argument("--size", choices=SETTINGS, default="full")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/experiments"),
        help="folder of the corpus, the runs and their logs (default: %(default)s)",
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of what is kept"
    )
    asked = parser.parse_args(argv)
    settings, until = SETTINGS[asked.size], started + asked.limit

    corpus.prepare(asked.work / "corpus", settings.vocab_size)
    print(f"corpus ready after {time.monotonic() - started:.0f} s", flush=True)
    for recipe, _ in parity.ORDER:
        if recipe not in RECIPES:
            print(f"left out: {recipe} is no recipe of this version")
    runs = parity.jobs(settings, asked.work, asked.results)
    left = jobs.do(runs, asked.work / "parity", gpus=asked.gpus, until=until)
    if left:
        print(f"time is up; not finished: {', '.join(left)}; run this again")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
