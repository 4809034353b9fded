"""Measured rows, and the JSON file that keeps them.

The file holds a section for each subcommand, with the machine and the versions that it
was measured with: measuring one section leaves the others as they are.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from fbq_jax.bench.measure import Timing
from fbq_jax.kernels import tuning_table

SECTIONS = (
    "gemm",
    "quantize",
    "linear",
    "recipes",
    "block",
    "profile",
    "train",
    "scale",
    "losses",
)
_PACKAGES = ("fbq-jax", "jax", "jaxlib", "flax", "triton", "jax-triton")


class ResultsError(Exception):
    """A file of results cannot be read or written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured program.

    Attributes:
      what: its name.
      data: what it computed on, where a section has several.
      implementation: what computed it, ``"xla"`` for a baseline.
      shape: the sizes, as the section's table heads them.
      mesh: the devices, where a section is of several.
      fallback: the share of blocks that fell back, None where none can.
      ms: sustained milliseconds a call.
      burst_ms: milliseconds a call of a rested card.
      burst_of: what ``burst_ms`` covers, as in ``measure.Timing``.
      rate: 1e12 operations or bytes a second, sustained; of a kernel its share of a
        program's time, in percent.
      ratio: the rate over that of the section's baseline, sustained.
      burst_ratio: the same in bursts.
      tokens_s: tokens a second, sustained.
      efficiency: those over what as many devices would do that each were alone.
      errors: relative errors by name; against what, the section says.
      compile_s: seconds of the first call, compilation included.
      saved_bytes: what the forward pass leaves for the backward pass, a token.
      peak_bytes: what the program has allocated at once, arguments included, on a
        device.
    """

    what: str
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
    saved_bytes: float | None = None
    peak_bytes: int | None = None


def row(timing: Timing, work: float, baseline: Row | None = None, **labels: Any) -> Row:
    """A row of a timing and of what was done in it.

    Args:
      timing: of one call.
      work: of one call, operations or bytes.
      baseline: what the ratios are of; None for a baseline itself.
      **labels: the other fields of ``Row``.
    """
    rate = work / timing.ms / 1e9
    if baseline is not None:
        burst_rate = work / timing.burst_ms
        baseline_burst_rate = baseline.rate * baseline.ms / baseline.burst_ms * 1e9
        labels["ratio"] = rate / baseline.rate
        labels["burst_ratio"] = burst_rate / baseline_burst_rate
    return Row(**timing._asdict(), rate=rate, **labels)


def section(rows: Iterable[Row], *, quick: bool) -> dict[str, Any]:
    """Rows as a section of the file, with where and when they were measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "versions": _versions(),
        "quick": quick,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def default_path() -> Path:
    """``bench-<device>.json`` in the current directory."""
    return Path(f"bench-{tuning_table.path(jax.devices()[0].device_kind).name}")


def load(path: Path) -> dict[str, Any]:
    """The sections of a file.

    Raises:
      ResultsError: if it cannot be read or is not a file of this module.
    """
    try:
        sections = json.loads(path.read_text())
        for content in sections.values():
            content["rows"] = [_read_row(values) for values in content["rows"]]
        unknown = set(sections) - set(SECTIONS)
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(f"{path} does not hold results of this command") from error
    if unknown:
        raise ResultsError(f"{path} does not hold results of this command")
    return sections


def check_writable(path: Path) -> None:
    """Finds out before anything is measured that ``merge`` would fail.

    Raises:
      ResultsError: if the file's folder cannot be written, or something else is there.
    """
    if not path.parent.is_dir():
        raise ResultsError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ResultsError(f"cannot write {path}: {path.parent} is read-only")
    if path.exists():
        load(path)


def merge(path: Path, name: str, content: dict[str, Any]) -> None:
    """Puts a section into a file, beside the sections that are there."""
    sections = json.loads(path.read_text()) if path.exists() else {}
    sections[name] = content
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    ordered = {name: sections[name] for name in SECTIONS if name in sections}
    unfinished.write_text(json.dumps(ordered, indent=1) + "\n")
    unfinished.replace(path)


def _read_row(values: dict[str, Any]) -> Row:
    return Row(**{**values, "shape": tuple(values["shape"])})


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _driver() -> str | None:
    """The NVIDIA driver's version, None where there is none that tells it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0].strip() or None
