"""Training runs and their JSON results."""

import dataclasses
import hashlib
import shutil
import statistics
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from examples.llama import mesh, metrics, run_folder, training
from examples.llama.config import Config
from experiments import result_files
from experiments.result_files import ResultsError
from experiments.settings import TRAINED, Experiment

# The run whose model is studied.
BASE = "bf16-0"
SEEDS = (0, 1, 2)  # of fine-tuning
# Options by which results may differ, with the paths of another machine.
_CHANGEABLE = run_folder.CHANGEABLE | {"from_hf"}
_MAX_LOOKS = 128  # recorded values of each rate and threshold


@dataclass(frozen=True)
class Run:
    """A run to execute."""

    config: Config
    out: Path  # the folder of the run
    result: Path  # the file of the results
    model: str | None = None  # the planted model that the run starts from, if any
    mesh: str = ""  # the devices, as for `--mesh`; empty for one

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

    def train(self) -> None:
        """Trains, or continues to train, without a result."""
        with mesh.use(mesh.make(self.mesh)):
            resume = run_folder.has_run(self.out)
            training.train(self.config, self.out, resume=resume)


def pretraining(experiment: Experiment) -> dict[str, list[Run]]:
    """Returns the runs of `parity`, from the same weights and on the same batches.

    The runs of a recipe share a process, whose peak memory is theirs. The first of bf16
    has its own, because others wait for its model.
    """
    settings = experiment.settings
    found: dict[str, list[Run]] = {}
    for recipe, seed in settings.parity:
        name = f"{recipe}-{seed}"
        run = _run(
            *(experiment, "parity", name, "python"),
            settings.pretrain | {"recipe": recipe, "seed": seed},
            mesh=settings.mesh,
        )
        found.setdefault(name if name == BASE else recipe, []).append(run)
    return found


def fine_tuning(experiment: Experiment) -> dict[str, list[Run]]:
    """Returns the runs of `outliers` by recipe, which share a process.

    The model without outliers is fine-tuned in bf16 only, for reference.
    """
    settings = experiment.settings
    shared = ("seq", "batch", "log_every", "steps", "eval_every")
    options = {name: settings.pretrain[name] for name in shared} | settings.finetune
    return {
        recipe: [
            _run(
                *(experiment, "outliers", f"{model}-{recipe}-{seed}", "cpp"),
                options
                | {"recipe": recipe, "seed": seed}
                | {"from_hf": str(experiment.model(model))},
                model=model,
            )
            for seed in SEEDS
            for model in settings.models
            if model != TRAINED or recipe == "bf16"
        ]
        for recipe in settings.tuned
    }


def longer(experiment: Experiment) -> dict[str, list[Run]]:
    """Returns the runs of `longer`: more steps, no clipping, high learning rates.

    The first learning rate comes first, in case time runs out.
    """
    settings = experiment.settings
    options = settings.pretrain | settings.longer
    return {
        (name := f"{recipe}-{lr:g}"): [
            _run(
                *(experiment, "longer", name, "python"),
                options | {"recipe": recipe, "lr": lr},
            )
        ]
        for lr in settings.longer_lrs
        for recipe in dict.fromkeys(recipe for recipe, _ in settings.parity)
    }


def _run(
    experiment: Experiment,
    stage: str,
    name: str,
    domain: str,
    options: dict[str, Any],
    **more: Any,
) -> Run:
    return Run(
        Config(data=str(experiment.text(domain)), **options),
        experiment.work / stage / name,
        experiment.results / stage / f"{name}.json",
        **more,
    )


def figures(config: Config) -> dict[str, Any]:
    """Trains in a folder that is deleted, and returns what `write` would write."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder, "run"), Path(folder, "result.json"))
        do([run])
        return result_files.read(run.result)


def are_done(runs: Collection[Run]) -> bool:
    """Whether all runs have ended."""
    return all(run.is_done() for run in runs)


def do(runs: Collection[Run]) -> None:
    """Trains, or continues to train, those that have not ended; writes their results.

    Raises:
        KeyboardInterrupt: A signal stopped a run. Its partial result is written.
        UserError: The folder of a run cannot be used, or there are too few devices.
            Nothing is written.
    """
    for run in runs:
        if not run.is_done():
            _do(run)


def _do(run: Run) -> None:
    before = metrics.read(run.out / "metrics.jsonl")
    try:
        run.train()
    except training.DivergedError as error:
        write(run, before, done=True, diverged=str(error))
        return
    except KeyboardInterrupt:
        write(run, before, done=False)
        raise
    write(run, before, done=True)
    if not run.config.save_every:
        shutil.rmtree(run.out)


def write(run: Run, before: list[dict[str, Any]], *, done: bool, **more: Any) -> None:
    """Writes the result of a run as far as it has come.

    Args:
        run: The run.
        before: The records that existed when this process started.
        done: Whether the run has ended.
        **more: Further entries of the result.
    """
    records = metrics.read(run.out / "metrics.jsonl")
    if not records:
        return
    trained = records != before[: len(records)]
    if run.model is not None:
        start = Path(str(run.config.from_hf))
        more |= {"model": run.model, "weights": weights(start)}
    looks = records[:: -(-len(records) // _MAX_LOOKS)]
    result = more | {
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
    result_files.save(result, run.result)


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
