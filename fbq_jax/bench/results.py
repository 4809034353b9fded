"""Measured rows, and the JSON file that stores them.

The file holds one section for each benchmark, with the machine and the versions that
it was measured with. Measuring a section leaves the others as they are.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from fbq_jax.bench.measure import Timing
from fbq_jax.kernels import tuning_table

# The keys in the file of sections that have another name there.
_KEYS = {"scaling": "scale", "parity": "losses"}
_FIELDS = {"date", "device", "driver", "versions", "quick", "rows"}
_PACKAGES = ("fbq-jax", "jax", "jaxlib", "flax", "jax-triton", "triton")


class ResultsError(Exception):
    """A results file cannot be read or written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured program. The fields are the keys in the file.

    A figure is None where it does not apply or was not measured.
    """

    what: str  # the program's name
    layer: str | None = None  # the Flax class, or "core" for the functional core
    data: str | None = None  # the name of the input
    implementation: str  # the backend that computes it
    shape: tuple[int, ...]  # the sizes; ``report.HEADINGS`` names them
    mesh: str | None = None  # the devices
    fallback: float | None = None  # the share of blocks that fall back
    ms: float  # sustained, per call
    burst_ms: float  # per call, on a rested GPU
    burst_of: str  # what ``burst_ms`` covers, as in ``measure.Timing``
    rate: float  # sustained 1e12 operations per second; of a kernel, its % of the time
    ratio: float = 1.0  # the rate over the baseline's, sustained
    burst_ratio: float = 1.0  # the same in bursts
    tokens_s: float | None = None  # sustained
    efficiency: float | None = None  # ``tokens_s`` over N times one device's
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # by name
    compile_s: float | None = None  # seconds of the first call
    # Figures of older files: first calls in new processes by the number of layers, the
    # kernels of a call per layer and their time, the rest of ``ms``, and branches.
    first_calls_s: dict[str, float] | None = None
    launches: float | None = None
    kernels_ms: float | None = None
    gap_ms: float | None = None
    conditionals: int | None = None
    saved_bytes: float | None = None  # for the backward pass, per token
    peak_bytes: int | None = None  # allocated at once on a device


def row(timing: Timing, work: float, **labels: Any) -> Row:
    """The row of a program; work counts the operations or bytes of a call."""
    return Row(**timing._asdict(), rate=work / timing.ms / 1e9, **labels)


def with_ratios(rows: Iterable[Row]) -> Iterator[Row]:
    """Compares the rate of each row with the first row of the same data."""
    baselines: dict[str | None, Row] = {}
    for row in rows:
        baseline = baselines.setdefault(row.data, row)
        yield dataclasses.replace(
            row,
            ratio=row.rate / baseline.rate,
            burst_ratio=_burst_rate(row) / _burst_rate(baseline),
        )


def _burst_rate(row: Row) -> float:
    return row.rate * row.ms / row.burst_ms


def section(rows: Iterable[Row], *, quick: bool) -> dict[str, Any]:
    """A section of the file: the rows, and where and when they were measured."""
    return {
        "date": today(),
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "versions": versions(),
        "quick": quick,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def today() -> str:
    """The date, such as 2026-01-31, in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def default_path(suffix: str = "") -> Path:
    """``bench-<device><suffix>.json`` in the current directory."""
    device = tuning_table.path(jax.devices()[0].device_kind).stem
    return Path(f"bench-{device}{suffix}.json")


def load(path: Path) -> dict[str, Any]:
    """The sections of a file by name."""
    names = {key: name for name, key in _KEYS.items()}
    try:
        sections = json.loads(path.read_bytes())
        for section in sections.values():
            if not section.keys() >= _FIELDS:
                raise KeyError(*_FIELDS - section.keys())
            section["rows"] = [
                Row(**row | {"shape": tuple(row["shape"])}) for row in section["rows"]
            ]
        return {names.get(key, key): section for key, section in sections.items()}
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(f"{path} does not hold benchmark results") from error


def check_writable(path: Path) -> None:
    """Checks before anything is measured that ``merge`` can write."""
    if not path.parent.is_dir():
        raise ResultsError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ResultsError(f"cannot write {path}: {path.parent} is read-only")
    if path.exists():
        load(path)


def write(path: Path, content: Any) -> None:
    """Writes a JSON file, at once."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def merge(path: Path, name: str, content: dict[str, Any]) -> None:
    """Writes a section into a file and keeps the other sections."""
    sections = json.loads(path.read_bytes()) if path.exists() else {}
    write(path, sections | {_KEYS.get(name, name): content})


def versions(*others: str) -> dict[str, str]:
    """The versions of Python and of the packages that decide a measurement."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _driver() -> str | None:
    """The version of the NVIDIA driver; None where ``nvidia-smi`` does not tell it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0].strip() or None
