"""The metrics of a run: a log of JSON lines that survives a crash, and summaries."""

import json
import math
import os
import platform
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

import fbq_jax
from examples.llama import atomic

# Entries of a record that are numbers, or null.
_NUMBERS = (
    *("loss", "grad_norm", "lr", "val_loss", "tokens_per_s", "mfu"),
    *("load_balance", "router_z"),
)


class MetricsError(RuntimeError):
    """The metrics file of a run cannot be written."""


class MetricsLog:
    """Writes one JSON object per step, each on its own line, without buffering.

    Numbers that are not finite are written as null, because JSON cannot express them.

    Attributes:
        missing: The number of steps up to `after_step` that have no record.
        moved: The number of lines that moved to `metrics.repeated.jsonl`.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        """Opens `path` to continue after a step.

        The lines of later steps, which will run again, and damaged lines move to the
        end of `metrics.repeated.jsonl` beside it.

        Raises:
            MetricsError: A file cannot be read or written.
        """
        self._path = path
        with self._named_errors():
            lines = path.read_bytes().splitlines() if path.exists() else []
            kept: dict[int, bytes] = {}
            moved = []
            for line in lines:
                step = (_parse(line) or {"step": 0})["step"]
                if 1 <= step <= after_step and step not in kept:
                    kept[step] = line
                else:
                    moved.append(line)
            self.missing, self.moved = after_step - len(kept), len(moved)
            if moved:  # before they leave the file
                _append(path.with_suffix(".repeated.jsonl"), moved)
            atomic.write(path, b"".join(kept[step] + b"\n" for step in sorted(kept)))
            self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record`: numbers and arrays in nested dictionaries.

        Raises:
            MetricsError: The file cannot be written.
        """
        with self._named_errors():
            self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._named_errors():
            self._file.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MetricsError(
                f"{self._path} cannot be written: {error.strerror}. Make room, or make "
                "the folder writable, and continue with --resume"
            ) from error


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the records in `path`, in order; none if it does not exist.

    Lines that are no records are left out: a killed run can leave a truncated one.
    """
    if not path.exists():
        return []
    records = map(_parse, path.read_bytes().splitlines())
    return [record for record in records if record is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None if it holds something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    numbers = [record["step"], *(record.get(name) for name in _NUMBERS)]
    if not all(map(_is_number, numbers)):
        return None
    layers = record.get("fallback", {})
    if not isinstance(layers, dict) or not all(map(_has_rates, layers.values())):
        return None
    if "expert_load" in record and not _is_table(record["expert_load"]):
        return None
    return record


def _is_table(value: Any) -> bool:
    """Whether a value holds a number for each expert of each layer."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    sizes = {len(row) for row in value}
    return (
        len(sizes) == 1
        and 0 not in sizes
        and all(_is_number(item) for row in value for item in row)
    )


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or None, which stands for one that is not finite."""
    if isinstance(value, int):
        return abs(value) < 2**63  # NumPy takes no other integer
    return value is None or isinstance(value, float)


def _has_rates(layer: Any) -> bool:
    """Whether the statistics of layers hold a rate, or a list with that of each."""
    if not isinstance(layer, dict) or "rate" not in layer:
        return False
    if "expert_rates" in layer and not _is_table(layer["expert_rates"]):
        return False
    rates = layer["rate"]
    return all(map(_is_number, rates if isinstance(rates, list) else [rates]))


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))


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
    """The summary of a run; NaN stands for what no record holds.

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

    def values(name: str) -> list[float]:
        found = (record.get(name) for record in records)
        return [value for value in found if value is not None]

    mfu = values("mfu")
    return Summary(
        loss=statistics.fmean(values("loss")[-20:] or [math.nan]),
        val_loss=(values("val_loss") or [math.nan])[-1],
        tokens_per_s=statistics.median(values("tokens_per_s") or [math.nan]),
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


def machine() -> dict[str, Any]:
    """Describes the device, the host and the versions that numbers come from."""
    return {
        "device": jax.devices()[0].device_kind,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions("jax", "flax", "optax"),
    }


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, of packages and of this library.

    The library need not be installed.
    """
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "fbq-jax": fbq_jax.__version__,
    }


def write_comparison(runs: list[Path], path: Path) -> None:
    """Writes the summaries of finished runs, their options and the machine as JSON."""
    summaries = {out.name: asdict(summarize(out)) for out in runs}
    options = json.loads((runs[0] / "config.json").read_text())
    del options["recipe"]
    comparison = {**machine(), "options": options, "runs": summaries}
    text = json.dumps(_plain(comparison), indent=2, allow_nan=False)
    atomic.write(path, text + "\n")


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
