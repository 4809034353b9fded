"""Fine-tuning of models with outliers, with each recipe.

    python -m examples.llama.experiments.outliers SIZE WORK RESULTS

plants outliers in the bf16 model of `parity`, in activations or in gradients.
"""

import dataclasses
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from examples.llama import hf
from examples.llama.build import build
from examples.llama.config import Config
from examples.llama.data import batches, load_corpus
from examples.llama.experiments import parity, runs
from examples.llama.experiments.plant import Planted, plant, plant_gradients
from examples.llama.experiments.probe import Operands, operands
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import SETTINGS, Settings
from examples.llama.step import PyTree, make_eval
from examples.llama.training import last_state

SEEDS = (0, 1, 2)
TRAINED = "trained"
GRADIENTS = "gradients"


def models(settings: Settings, work: Path) -> dict[str, Path]:
    """Returns the folders of the trained model and of the models with outliers."""
    names = [TRAINED, *map(str, settings.outliers)]
    if settings.gradient_factor is not None:
        names.append(GRADIENTS)
    return {name: work / "models" / name for name in names}


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """Returns the commands of the fine-tuning runs, one process for each recipe.

    The model without outliers is fine-tuned in bf16 only, for reference.
    """
    asked = {
        recipe: [
            _run(settings, work, results, name, recipe, seed)
            for seed in SEEDS
            for name in models(settings, work)
            if name != TRAINED or recipe == "bf16"
        ]
        for recipe in settings.tuned
    }
    return runs.commands("outliers", work, asked)


def _run(
    settings: Settings, work: Path, results: Path, model: str, recipe: str, seed: int
) -> Run:
    shared = ("seq", "batch", "log_every", "steps", "eval_every")
    options = {name: settings.pretrain[name] for name in shared} | settings.finetune
    name = f"{model}-{recipe}-{seed}"
    return Run(
        Config(
            recipe=recipe,
            seed=seed,
            from_hf=str(models(settings, work)[model]),
            data=str(work / "corpus" / "cpp"),
            **options,
        ),
        work / "outliers" / name,
        results / "outliers" / f"{name}.json",
        {"model": model},
    )


def make_models(settings: Settings, work: Path, results: Path) -> None:
    """Writes `models` from the checkpoint of `parity`, and describes them as JSON."""
    run = parity.base(settings, work, results)
    model, _, corpus = build(run.config)
    state = last_state(run.config, run.out)
    sizes = {"seq": run.config.seq, "batch": settings.studied}
    tokens = jnp.asarray(batches(corpus, "train", seed=0, **sizes)[0])
    texts = {"python": corpus, "cpp": load_corpus(work / "corpus" / "cpp")}
    evaluate = {
        domain: make_eval(model, batches(text, "val", seed=0, **sizes))
        for domain, text in texts.items()
    }

    def probed(params: PyTree) -> dict[str, Operands]:
        return operands(model.config, params, tokens)

    def describe(params: PyTree) -> dict[str, object]:
        of = probed(params)
        peaks = jnp.abs(of["down"].x).max(axis=(1, 2))
        changed = dataclasses.replace(state, params=params)
        return {
            "largest": float(peaks.max()),
            "by_layer": peaks.tolist(),
            "gradient_ratio": float(_ratio(_gradient_of_up(of))),
            "val_loss": {name: loss(changed) for name, loss in evaluate.items()},
        }

    def add(name: str, planted: Planted) -> None:
        params[name] = planted.params
        facts[name] = describe(planted.params) | {
            "channels": planted.channels.tolist(),
            "factors": planted.factors.tolist(),
        }

    params, facts = {TRAINED: state.params}, {TRAINED: describe(state.params)}
    of = probed(state.params)
    for largest in settings.outliers:
        add(str(largest), plant(state.params, of["down"].x, largest))
    if (factor := settings.gradient_factor) is not None:
        add(GRADIENTS, plant_gradients(state.params, _gradient_of_up(of), factor))
    for name, folder in models(settings, work).items():
        if folder.exists():  # it may come from another checkpoint
            shutil.rmtree(folder)
        hf.save(folder, model.config, jax.device_get(params[name]))
        facts[name]["weights"] = runs.weights(folder)
    runs.save(facts, results / "planted.json")


def _ratio(x: jax.Array) -> jax.Array:
    """The most that a layer's largest magnitude exceeds its root mean square."""
    x = x.astype(jnp.float32)
    return (jnp.abs(x).max(axis=(1, 2)) / jnp.sqrt((x**2).mean(axis=(1, 2)))).max()


def _gradient_of_up(of: dict[str, Operands]) -> jax.Array:
    """The gradient of the output of `up`, [L, M, F], from those of all projections."""
    return of["gate_up"].dy[..., of["down"].x.shape[-1] :]


if __name__ == "__main__":
    make_models(SETTINGS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
