"""Training runs and their JSON results.

    python -m examples.llama.experiments.runs RUNS.json

executes the runs that `command` wrote to the file, one after another, and continues
runs that were stopped.
"""

import dataclasses
import hashlib
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from examples.llama import atomic, mesh, metrics, run_folder, training
from examples.llama.config import Config
from examples.llama.experiments import result_files
from examples.llama.experiments.jobs import STOPPED
from examples.llama.experiments.result_files import ResultsError

# Options by which results may differ, with the paths of another machine.
_CHANGEABLE = run_folder.CHANGEABLE | {"from_hf"}
_MAX_LOOKS = 128  # recorded values of each rate and threshold


@dataclass(frozen=True)
class Run:
    """A run to execute.

    Attributes:
        config: The options of the run.
        out: The folder of the run.
        result: The file of the results.
        about: Further entries of the results, which identify the run.
        mesh: The devices, as for `--mesh`; empty for one.
    """

    config: Config
    out: Path
    result: Path
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the run as JSON, for `from_json`."""
        return {
            "config": dataclasses.asdict(self.config),
            "out": str(self.out.absolute()),
            "result": str(self.result.absolute()),
            "about": self.about,
            "mesh": self.mesh,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Run":
        """Returns the run that `to_json` stored."""
        return cls(
            Config(**stored["config"]),
            Path(stored["out"]),
            Path(stored["result"]),
            stored["about"],
            stored["mesh"],
        )

    def is_done(self) -> bool:
        """Whether the run has ended, by completing or by diverging.

        Raises:
            ResultsError: The file has the result of a run with other options.
        """
        if not self.result.exists():
            return False
        stored = result_files.read(self.result)
        for name, value in dataclasses.asdict(self.config).items():
            # None is the default of a version. Older results lack newer options.
            if name in _CHANGEABLE or value is None:
                continue
            if stored["options"].get(name, value) != value:
                raise ResultsError(
                    f"{self.result} has {name} = {stored['options'][name]}, and this "
                    f"run has {value}: choose another folder with --results"
                )
        return bool(stored["done"])


def commands(
    stage: str, work: Path, runs: Mapping[str, Sequence[Run]]
) -> dict[str, list[str]]:
    """Returns a command for each sequence of runs that has some left.

    Args:
        stage: The stage of the experiments; the names of its commands begin with it.
        work: The folder to write the files of `command` to.
        runs: The runs that share a process, by name.
    """
    made = {
        f"{stage}-{name}": command(group, work / stage / f"{name}.json")
        for name, group in runs.items()
    }
    return {name: command for name, command in made.items() if command}


def command(runs: Sequence[Run], file: Path) -> list[str]:
    """Writes the file and returns the command for its runs; empty if all are done."""
    left = [run.to_json() for run in runs if not run.is_done()]
    if not left:
        return []
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(left, indent=2) + "\n")
    return [sys.executable, "-m", "examples.llama.experiments.runs", str(file)]


def do(run: Run) -> None:
    """Trains, or continues to train, and writes the result.

    Raises:
        KeyboardInterrupt: A signal stopped the run. Its partial result is written.
        RunError: The folder cannot be used. Nothing is written.
        MeshError: There are too few devices. Nothing is written.
    """
    about = dict(run.about)
    before = metrics.read(run.out / "metrics.jsonl")
    try:
        with mesh.use(mesh.make(run.mesh)):
            training.train(run.config, run.out, resume=run_folder.has_run(run.out))
    except training.DivergedError as error:
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
    """Writes the result of a run as far as it has come.

    Args:
        run: The run.
        before: The records that existed when this process started.
        done: Whether the run has ended.
        about: Further entries of the result.
    """
    records = metrics.read(run.out / "metrics.jsonl")
    if not records:
        return
    trained = records != before[: len(records)]
    if run.config.from_hf is not None:
        about = about | {"weights": weights(Path(run.config.from_hf))}
    looks = records[:: -(-len(records) // _MAX_LOOKS)]
    result = about | {
        "done": done,
        "options": run_folder.read_options(run.out),
        "machine": machine() | ({"mesh": run.mesh} if run.mesh else {}),
        "steps": len(records),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in records),
        # Without a step this process has only seen the memory of a checkpoint.
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
    """Writes JSON with floats of eight digits, about the precision of float32."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), separators=(",", ":"))
    atomic.write(file, text.replace(',"', ',\n"') + "\n")  # one line per list


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def weights(model: Path) -> str:
    """Returns the SHA-256 of the weights in a folder that `hf.save` wrote."""
    with (model / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine() -> dict[str, str]:
    """Describes the device and the versions of the packages."""
    return {
        "device": jax.devices()[0].device_kind,
        **metrics.versions("jax", "jaxlib", "flax", "optax"),
    }


def peak_bytes() -> int | None:
    """Returns the peak device memory of this process; None if unknown."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else int(stats["peak_bytes_in_use"])


def main(file: Path) -> int:
    """Executes the runs in the file and returns the exit status."""
    try:
        for stored in json.loads(file.read_text()):
            do(Run.from_json(stored))
    except KeyboardInterrupt:
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
