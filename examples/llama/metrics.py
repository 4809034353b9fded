"""The metrics of a run: a log of JSON lines that survives a crash, and summaries."""

import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import fbq_jax
from examples.llama import atomic
from examples.llama.errors import writing

# Entries of a record that are numbers, or null.
_NUMBERS = ("loss", "val_loss", "tokens_per_s", "mfu")


def continue_after(step: int, path: Path) -> None:
    """Prepares the log of a run, one JSON object per line and step, for later steps.

    The lines of later steps, which will run again, and damaged lines move to the end of
    `metrics.repeated.jsonl` beside it.
    """
    kept: dict[int, bytes] = {}
    moved = b""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        found = (_parse(line) or {"step": -1})["step"]
        if step and 0 <= found <= step and found not in kept:
            kept[found] = line
        else:
            moved += line + b"\n"
    with writing(path):
        if moved:  # before they leave the file
            other = path.with_suffix(".repeated.jsonl")
            print(f"later or damaged lines of {path} moved to {other}")
            with other.open("ab") as file:
                file.write(moved)
        atomic.write(path, b"".join(kept[step] + b"\n" for step in sorted(kept)))
    if lost := step - len(kept.keys() - {0}):
        print(f"warning: {path} lacks {lost} of the {step} steps so far")


def append(record: dict[str, Any], path: Path) -> None:
    """Appends a record to a log: numbers and arrays in nested dictionaries."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_plain(record)) + "\n")


def read(path: Path, first: int = 1) -> list[dict[str, Any]]:
    """Reads the records in `path` from step `first` on, in order.

    Step 0 is the validation before training. Lines that are no records are left out.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = map(_parse, lines)
    return [record for record in records if record and record["step"] >= first]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None if it holds something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    numbers = (record.get(name) for name in _NUMBERS)
    return record if all(isinstance(x, float | int | None) for x in numbers) else None


def _plain(tree: Any) -> Any:
    """What JSON can express of numbers and arrays in nested dictionaries."""
    text = json.dumps(tree, default=lambda array: array.tolist())
    return json.loads(text, parse_constant=lambda _: None)  # NaN and infinities


@dataclass(frozen=True)
class Summary:
    """Means and medians over the steps of a run; NaN for what no record holds."""

    loss: float  # the mean of the last steps
    steps: int  # that it is the mean of, up to 20
    val_loss: float  # the last one
    first_val_loss: float  # before training; older runs have none
    tokens_per_s: float  # the median
    mfu: float | None  # of the device's bfloat16 peak; None if it is unknown


def summarize(out: Path) -> Summary:
    """Summarizes the finished run in `out`."""
    records = read(out / "metrics.jsonl", first=0)

    def values(name: str) -> list[float]:
        return [x for record in records if (x := record.get(name)) is not None]

    mfu, losses = values("mfu"), values("loss")[-20:]
    before = [r["val_loss"] for r in records if r["step"] == 0 and r.get("val_loss")]
    return Summary(
        loss=statistics.fmean(losses or [math.nan]),
        steps=len(losses),
        val_loss=(values("val_loss") or [math.nan])[-1],
        first_val_loss=(before or [math.nan])[0],
        tokens_per_s=statistics.median(values("tokens_per_s") or [math.nan]),
        mfu=statistics.median(mfu) if mfu else None,
    )


def report(out: Path) -> str:
    """Describes the finished run in `out`: its losses, its speed and its files."""
    run = summarize(out)
    lines = {"loss": f"{run.loss:.4f} training ({describe_mean(run)})"}
    lines["validation"] = f"{run.val_loss:.4f} after training"
    if not math.isnan(run.first_val_loss):
        lines["validation"] += f", {run.first_val_loss:.4f} before it"
    mfu = "" if run.mfu is None else f", {run.mfu:.1%} model FLOP utilization"
    lines["speed"] = f"{run.tokens_per_s:,.0f} tokens/s{mfu} (median of the steps)"
    files = {"picture": "curves.png", "metrics": "metrics.jsonl"}
    files |= {"checkpoints": "checkpoints", "model": "hf"}
    lines |= {n: str(out / file) for n, file in files.items() if (out / file).exists()}
    return "\n".join(f"  {name:13}{line}" for name, line in lines.items())


def describe_mean(run: Summary) -> str:
    """What the training loss of a summary is the mean of, in words."""
    return f"mean of the last {run.steps} steps" if run.steps > 1 else "of one step"


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, of packages and of this library."""
    found = {package: version(package) for package in packages}
    found["fbq-jax"] = fbq_jax.__version__  # which need not be installed
    return {"python": platform.python_version(), **found}


def write_comparison(runs: list[Path], path: Path) -> None:
    """Writes the summaries of finished runs, their options and the machine as JSON."""
    options = json.loads((runs[0] / "config.json").read_text(encoding="utf-8"))
    del options["recipe"]
    comparison = {
        "device": jax.devices()[0].device_kind,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions("jax", "flax", "optax"),
        "options": options,
        "runs": {out.name: asdict(summarize(out)) for out in runs},
    }
    atomic.write(path, json.dumps(_plain(comparison), indent=2) + "\n")


def compare(runs: list[Path]) -> str:
    """Returns a table of final losses, with the differences from the first run."""
    first, width = summarize(runs[0]), max(12, *(len(out.name) + 2 for out in runs))
    head = f"{'training loss':^20}{'validation loss':^20}{'tokens/s':>12}"
    lines = [" " * width + head]
    for out, run in zip(runs, map(summarize, runs), strict=True):
        line = f"{out.name:{width}}{run.loss:10.4f} {run.loss - first.loss:+8.4f} "
        line += f"{run.val_loss:10.4f} {run.val_loss - first.val_loss:+8.4f} "
        lines.append(line + f"{run.tokens_per_s:12,.0f}")
    return "\n".join([*lines, f"training loss: {describe_mean(first)}"])
