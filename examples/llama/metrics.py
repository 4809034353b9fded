"""The metrics of a run: a log of JSON lines that survives a crash, and summaries."""

import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from examples.llama import atomic


class MetricsError(ValueError):
    """The metrics file of a run is damaged."""


class MetricsLog:
    """Writes one JSON object per step, each on its own line, without buffering.

    Numbers that are not finite are written as null, because JSON cannot express them.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        """Opens `path` to continue after a step.

        Records of later steps, which will run again, are dropped, and so is a truncated
        line.

        Raises:
            MetricsError: A step up to `after_step` has no record. The file is not
                changed.
        """
        kept = read(path)[:after_step]
        if [record.get("step") for record in kept] != list(range(1, after_step + 1)):
            raise MetricsError(
                f"{path} is damaged: it must have a line for each of the {after_step} "
                "steps before the checkpoint. Start again with another --out."
            )
        atomic.write(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record`: numbers and arrays in nested dictionaries."""
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the records in `path` up to a truncated line; none if it does not exist."""
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if not isinstance(record, dict):
                break
            records.append(record)
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Summary:
    """The summary of a run.

    Attributes:
        loss: The mean training loss of the last 20 steps, in nats per token.
        val_loss: The last validation loss, in nats per token.
        tokens_per_s: The median speed over the steps, in tokens per second.
        mfu: The median model FLOP utilization, as a fraction of the device's bfloat16
            peak; None if the peak is unknown.
    """

    loss: float
    val_loss: float
    tokens_per_s: float
    mfu: float | None


def summarize(out: Path) -> Summary:
    """Summarizes the finished run in `out`."""
    records = read(out / "metrics.jsonl")
    mfu = [record["mfu"] for record in records if "mfu" in record]
    return Summary(
        loss=statistics.fmean(record["loss"] for record in records[-20:]),
        val_loss=[r["val_loss"] for r in records if "val_loss" in r][-1],
        tokens_per_s=statistics.median(r["tokens_per_s"] for r in records),
        mfu=statistics.median(mfu) if mfu else None,
    )


def report(out: Path) -> str:
    """Describes the finished run in `out`: its losses, its speed and its files."""
    run = summarize(out)
    mfu = "" if run.mfu is None else f", {run.mfu:.1%} model FLOP utilization"
    lines = [
        f"  loss         {run.loss:.4f} training (mean of the last 20 steps), "
        f"{run.val_loss:.4f} validation",
        f"  speed        {run.tokens_per_s:,.0f} tokens/s{mfu}",
    ]
    files = {
        "picture": out / "curves.png",
        "metrics": out / "metrics.jsonl",
        "checkpoints": out / "checkpoints",
        "model": out / "hf",
    }
    lines += [f"  {name:13}{path}" for name, path in files.items() if path.exists()]
    return "\n".join(lines)


def write_comparison(runs: list[Path], path: Path) -> None:
    """Writes the summaries of finished runs, their options and the machine as JSON."""
    summaries = {out.name: asdict(summarize(out)) for out in runs}
    packages = ("jax", "flax", "optax", "fbq-jax")
    options = json.loads((runs[0] / "config.json").read_text())
    del options["recipe"]
    comparison = {
        "device": jax.devices()[0].device_kind,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in packages},
        "options": options,
        "runs": summaries,
    }
    atomic.write(path, json.dumps(comparison, indent=2) + "\n")


def compare(runs: list[Path]) -> str:
    """Returns a table of final losses, with the differences from the first run."""
    summaries = [summarize(out) for out in runs]
    first, names = summaries[0], max(12, *(len(out.name) + 2 for out in runs))
    head = f"{'training loss':^20}{'validation loss':^20}{'tokens/s':>12}"
    lines = [" " * names + head]
    lines += [
        f"{out.name:{names}}"
        f"{run.loss:10.4f} {run.loss - first.loss:+8.4f} "
        f"{run.val_loss:10.4f} {run.val_loss - first.val_loss:+8.4f} "
        f"{run.tokens_per_s:12,.0f}"
        for out, run in zip(runs, summaries, strict=True)
    ]
    return "\n".join(lines)
