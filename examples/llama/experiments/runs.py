"""One training run, and the JSON file that is left of it.

    python -m examples.llama.experiments.runs RUNS.json

does the runs that `command` has written into the file, one after another, and continues
those that were stopped.
"""

import dataclasses
import hashlib
import json
import platform
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from examples.llama import metrics, train
from examples.llama.config import Config
from examples.llama.experiments.jobs import STOPPED

_LOOKS = 128  # at the layers' rates and thresholds, at most
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "fbq-jax")


@dataclass(frozen=True)
class Run:
    """A run to do.

    Attributes:
        config: What to train.
        out: The folder of the run.
        result: The file of its numbers; a run that has one is done.
        about: What else is written there, to tell the run from others.
    """

    config: Config
    out: Path
    result: Path
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {
            "config": dataclasses.asdict(self.config),
            "out": str(self.out.absolute()),
            "result": str(self.result.absolute()),
            "about": self.about,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Run":
        """The run that was written."""
        return cls(
            Config(**stored["config"]),
            Path(stored["out"]),
            Path(stored["result"]),
            stored["about"],
        )

    def is_done(self) -> bool:
        """Whether it has ended, well or by diverging."""
        return self.result.exists() and json.loads(self.result.read_text())["done"]


def command(runs: Sequence[Run], file: Path) -> list[str]:
    """Writes the file and returns what does its runs; nothing if all are done."""
    left = [run.to_json() for run in runs if not run.is_done()]
    if not left:
        return []
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(left, indent=2) + "\n")
    return [sys.executable, "-m", "examples.llama.experiments.runs", str(file)]


def do(run: Run) -> None:
    """Trains, or goes on training, and writes the result.

    Raises:
        KeyboardInterrupt: It was told to stop. What there is of it is written.
        RunError: It cannot be in its folder. Nothing is written.
    """
    about = dict(run.about)
    before = metrics.read(run.out / "metrics.jsonl")
    try:
        train.train(run.config, run.out, resume=(run.out / "config.json").exists())
    except train.DivergedError as error:
        write(run, before, done=True, about=about | {"diverged": str(error)})
        return
    except KeyboardInterrupt:
        write(run, before, done=False, about=about)
        raise
    write(run, before, done=True, about=about)
    if not run.config.save_every:
        shutil.rmtree(run.out)


def write(
    run: Run, before: list[dict[str, Any]], *, done: bool, about: dict[str, Any]
) -> None:
    """Writes what there is of a run, of which this process found the records before."""
    records = metrics.read(run.out / "metrics.jsonl")
    if not records:
        return
    trained = records != before[: len(records)]
    if run.config.from_hf is not None:
        about = about | {"weights": weights(Path(run.config.from_hf))}
    looks = records[:: -(-len(records) // _LOOKS)]
    result = about | {
        "done": done,
        "options": train.read_options(run.out),
        "machine": machine(),
        "steps": len(records),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in records),
        # Of a process that took no step it would be what a checkpoint takes.
        "peak_bytes": peak_bytes() if trained else None,
        "loss": [r["loss"] for r in records],
        "grad_norm": [r["grad_norm"] for r in records],
        "val_loss": {r["step"]: r["val_loss"] for r in records if "val_loss" in r},
        "looks": [r["step"] for r in looks],
        "fallback": {
            layer: {
                name: [r["fallback"][layer][name] for r in looks]
                for name in ("rate", "theta")
            }
            for layer in records[0]["fallback"]
        },
    }
    save(result, run.result)


def save(result: Any, file: Path) -> None:
    """Writes JSON, its floats to eight digits, about what float32 has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    text = json.dumps(_rounded(result), separators=(",", ":"))
    part.write_text(text.replace(',"', ',\n"') + "\n")  # a list of numbers is a line
    part.replace(file)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def weights(model: Path) -> str:
    """The SHA-256 of the weights in a folder that `hf.save` has written."""
    with (model / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def peak_bytes() -> int | None:
    """The most memory that this process had in use; None where it is not known."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else int(stats["peak_bytes_in_use"])


def main(file: Path) -> int:
    """Does the runs in the file; returns the exit status."""
    try:
        for stored in json.loads(file.read_text()):
            do(Run.from_json(stored))
    except KeyboardInterrupt:
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
