"""Trains a Llama on sums by GRPO.

    python -m examples.grpo --recipe rowwise --seed 0 --out runs/grpo

It takes minutes on two CPU cores, and writes config.json and metrics.jsonl, with a line
for each rollout. `--help` lists the options.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from examples.grpo.config import Config
from examples.grpo.train import train
from examples.llama import atomic, fields
from examples.llama.errors import UserError, exit_status


def run(config: Config, out: Path) -> None:
    """Trains, and writes the files of the run to a new folder."""
    log = out / "metrics.jsonl"
    if log.exists():
        raise UserError(f"{out} already holds a run: set another --out")
    out.mkdir(parents=True, exist_ok=True)
    options = json.dumps(dataclasses.asdict(config), indent=2)
    atomic.write(out / "config.json", options + "\n")
    for record in train(config):
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shown = f"step {record['step']:4}  reward {record['reward']:.3f}"
        if "max_log_ratio" in record:
            shown += f"  largest |log ratio| {record['max_log_ratio']:.3g}"
            shown += f"  clipped {record['clipped']:.1%}"
        print(f"{shown}  {record['seconds']:.1f} s", flush=True)
    print(f"metrics: {log}; draw them with python -m examples.grpo.plot {out}")


def _parser() -> argparse.ArgumentParser:
    prog, text = "python -m examples.grpo", "Trains a Llama on sums by GRPO."
    parser = argparse.ArgumentParser(prog, description=text)
    fields.add_options(parser, Config)
    text = "folder of the run (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help=text)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    asked = _parser().parse_args(argv)
    return exit_status(lambda: run(Config(**fields.given(asked, Config)), asked.out))


if __name__ == "__main__":
    sys.exit(main())
