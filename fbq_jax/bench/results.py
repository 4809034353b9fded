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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from fbq_jax.bench.measure import Timing
from fbq_jax.kernels import tuning_table

SECTIONS = (
    "step",
    "step_profile",
    "map",
    "gemm",
    "quantize",
    "linear",
    "grouped",
    "moe",
    "moe_scaling",
    "serve",
    "recipes",
    "block",
    "profile",
    "train",
    "accumulation",
    "scaling",
    "parity",
)
# The names in the file of sections that were renamed since.
_KEYS = {name: name for name in SECTIONS} | {"scaling": "scale", "parity": "losses"}
_PACKAGES = ("fbq-jax", "jax", "jaxlib", "flax", "triton")


class ResultsError(Exception):
    """A results file cannot be read or written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured program. The fields are the keys in the file.

    Attributes:
      what: the program's name.
      layer: the Flax layer that calls it, or ``"core"`` for a call of the functional
        core; in the section ``grouped``, the products that it computes.  None in
        sections that measure one of them only.
      data: the name of its input, in sections with several.
      implementation: the backend that computes it.
      shape: the sizes; ``report.HEADINGS`` names them.
      mesh: the devices, in sections that use several.
      fallback: the share of blocks that fall back; None without fallback.
      ms: sustained milliseconds per call.
      burst_ms: milliseconds per call on a rested GPU.
      burst_of: what ``burst_ms`` covers, as in ``measure.Timing``.
      rate: sustained 1e12 operations or bytes per second; for a kernel, its percentage
        of the program's time.
      ratio: the rate divided by the baseline's, sustained.
      burst_ratio: the rate divided by the baseline's, in bursts.
      tokens_s: sustained tokens per second.
      efficiency: ``tokens_s`` of N devices over N times one device's.
      errors: errors by name; ``report.HEADINGS`` defines them.
      compile_s: seconds of the first call, compilation included.
      first_calls_s: seconds of the first call in a process that has compiled nothing,
        by the number of layers; None where it is not measured.
      launches: the kernels of one call, per layer; None where kernels cannot be timed.
      kernels_ms: the milliseconds of one call's kernels together.
      gap_ms: sustained milliseconds without ``kernels_ms``.
      conditionals: the number of conditionals in the compiled program.
      saved_bytes: bytes saved for the backward pass, per token.
      peak_bytes: bytes that the program has allocated at once on a device, arguments
        included.
    """

    what: str
    layer: str | None = None
    data: str | None = None
    implementation: str
    shape: tuple[int, ...]
    mesh: str | None = None
    fallback: float | None = None
    ms: float
    burst_ms: float
    burst_of: str
    rate: float
    ratio: float = 1.0
    burst_ratio: float = 1.0
    tokens_s: float | None = None
    efficiency: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    compile_s: float | None = None
    first_calls_s: dict[str, float] | None = None
    launches: float | None = None
    kernels_ms: float | None = None
    gap_ms: float | None = None
    conditionals: int | None = None
    saved_bytes: float | None = None
    peak_bytes: int | None = None


def row(timing: Timing, work: float, **labels: Any) -> Row:
    """The row of a timed program.

    Args:
      timing: the time of one call.
      work: operations or bytes of one call.
      **labels: the other fields of ``Row``.
    """
    return Row(**timing._asdict(), rate=work / timing.ms / 1e9, **labels)


def with_ratios(rows: Iterable[Row]) -> Iterator[Row]:
    """Compares the rate of each row with that of the first row of the same data."""
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


def default_path() -> Path:
    """``bench-<device>.json`` in the current directory."""
    return Path(f"bench-{tuning_table.path(jax.devices()[0].device_kind).name}")


def load(path: Path) -> dict[str, Any]:
    """The sections of a file by name.

    Raises:
      ResultsError: if the file cannot be read or holds something else.
    """
    names = {key: name for name, key in _KEYS.items()}
    try:
        return {
            names[key]: content | {"rows": list(map(_read_row, content["rows"]))}
            for key, content in json.loads(path.read_text()).items()
        }
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(f"{path} does not hold benchmark results") from error


def read_mapping(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file; None if the file holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_writable(path: Path) -> None:
    """Checks before anything is measured that ``merge`` can write.

    Raises:
      ResultsError: if the folder is missing or read-only, or the file holds something
        else.
    """
    check_folder(path)
    if path.exists():
        load(path)


def check_folder(path: Path) -> None:
    """Checks that a file can be written into its folder.

    Raises:
      ResultsError: if the folder is missing or read-only.
    """
    if not path.parent.is_dir():
        raise ResultsError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ResultsError(f"cannot write {path}: {path.parent} is read-only")


def check_own(path: Path, load: Callable[[Path], Any]) -> None:
    """Checks before anything is computed that a file of one kind can be written.

    Args:
      path: the file.
      load: reads such a file; returns None of another.

    Raises:
      ResultsError: if the folder is missing or read-only, or the file holds something
        else.
    """
    check_folder(path)
    if path.exists() and load(path) is None:
        raise ResultsError(f"{path} holds something else: choose another file")


def write(path: Path, content: Any) -> None:
    """Writes a JSON file, at once."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def part(path: Path, name: str) -> Path:
    """The file of a section's rows while ``path`` still has older ones."""
    return path.with_name(f"{path.name}.{name}.part")


def merge(path: Path, name: str, content: dict[str, Any]) -> None:
    """Writes a section into a file and keeps the other sections."""
    sections = json.loads(path.read_text()) if path.exists() else {}
    sections[_KEYS[name]] = content
    write(path, {key: sections[key] for key in _KEYS.values() if key in sections})


def _read_row(values: dict[str, Any]) -> Row:
    return Row(**values | {"shape": tuple(values["shape"])})


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide a measurement."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
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
