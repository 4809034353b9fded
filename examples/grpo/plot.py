"""Draws the rewards and the mismatches of runs.

    python -m examples.grpo.plot runs/grpo/* --out runs/grpo.json

It writes the metrics of the runs to one JSON file, and a picture beside it. Runs that
differ in their seeds share a color.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from examples.llama import atomic, metrics
from examples.llama.errors import UserError, exit_status
from examples.llama.plot import finish, save, smooth, style

_SMALLEST = 1e-7  # the axis of mismatches is linear below
_DIGITS = 5
Results = dict[str, Any]


def gather(folders: list[Path]) -> Results:
    """Returns the options and the metrics of runs, and the machine they ran on."""
    runs = []
    for folder in folders:
        config, records = folder / "config.json", metrics.read(folder / "metrics.jsonl")
        if not config.exists() or not records:
            raise UserError(f"{folder} holds no run: {config} and metrics of a step")
        columns = {
            name: [float(f"{record[name]:.{_DIGITS}g}") for record in records]
            for name in records[0].keys() - {"step", "seconds"}
        }
        options = json.loads(config.read_text(encoding="utf-8"))
        runs.append({"options": options, "metrics": dict(sorted(columns.items()))})
    return {
        "device": jax.devices()[0].device_kind,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": metrics.versions("jax", "flax", "optax"),
        "runs": runs,
    }


def by_label(results: Results) -> dict[str, list[dict[str, list[float]]]]:
    """Returns the metrics of runs by what they train and sample with."""
    found: dict[str, list[dict[str, list[float]]]] = {}
    for run in results["runs"]:
        options = run["options"]
        label = options["recipe"]
        if options["rollout"] not in (None, label):
            label += f", sampled by {options['rollout']}"
        if options["invariant"]:
            label += ", invariant"
        found.setdefault(label, []).append(run["metrics"])
    return found


def draw(results: Results) -> Figure:
    """Draws rewards, with thin curves of single runs, and the largest mismatches."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rewards, mismatches = figure.subplots(1, 2)
    rewards.set(title="Share of right answers in a rollout", xlabel="step")
    title = "Largest |log ratio| before the first update, of all seeds"
    mismatches.set(title=title, xlabel="step")
    mismatches.set_yscale("symlog", linthresh=_SMALLEST, linscale=0.5)
    for index, (label, runs) in enumerate(by_label(results).items()):
        line = {"label": label, **style(index)}
        count = min(len(run["reward"]) for run in runs)
        steps = np.arange(1, 1 + count)
        of_seeds, sizes = (
            np.array([run[name][:count] for run in runs])
            for name in ("reward", "max_log_ratio")
        )
        for curve in of_seeds:
            rewards.plot(steps, smooth(curve), color=line["color"], linewidth=0.5)
        rewards.plot(steps, smooth(of_seeds.mean(axis=0)), linewidth=2, **line)
        line["label"] += f": up to {sizes.max():.2g}" if sizes.any() else ": always 0"
        mismatches.plot(steps, sizes.max(axis=0), linewidth=1.5, **line)
    rewards.set(ylim=(0, 1))
    # The legend is above the curves.
    mismatches.set(ylim=(-_SMALLEST / 4, 1e4), yticks=[0, 1e-6, 1e-4, 1e-2, 1])
    finish(rewards, "upper left")
    finish(mismatches, "upper right")
    return figure


def _parser() -> argparse.ArgumentParser:
    prog, text = "python -m examples.grpo.plot", "Draws rewards and mismatches of runs."
    parser = argparse.ArgumentParser(prog, description=text)
    text = "folders of runs of examples.grpo"
    parser.add_argument("runs", type=Path, nargs="+", help=text)
    text = "file for the metrics; the picture is beside it (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/grpo.json"), help=text)
    return parser


def run(folders: list[Path], out: Path) -> None:
    """Writes the metrics of runs to a file, and a picture beside it."""
    results, picture = gather(folders), out.with_suffix(".png")
    lines = ",\n".join(map(json.dumps, results.pop("runs")))
    head = json.dumps(results, indent=2).removesuffix("\n}")
    atomic.write(out, f'{head},\n  "runs": [\n{lines}\n]}}\n')
    save(draw(json.loads(out.read_text(encoding="utf-8"))), picture)
    print(f"numbers: {out}\npicture: {picture}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    asked = _parser().parse_args(argv)
    return exit_status(lambda: run(asked.runs, asked.out))


if __name__ == "__main__":
    sys.exit(main())
