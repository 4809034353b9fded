"""Fine-tuning of models with outliers, by each recipe.

    python -m examples.llama.experiments.outliers SIZE WORK RESULTS

plants them into the bf16 model of `parity`.
"""

import dataclasses
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from examples.llama import checkpoint, hf, train
from examples.llama.config import Config
from examples.llama.data import batches, load_corpus
from examples.llama.experiments import parity, runs
from examples.llama.experiments.plant import plant
from examples.llama.experiments.probe import operands
from examples.llama.experiments.runs import Run
from examples.llama.experiments.settings import SETTINGS, Settings
from examples.llama.step import PyTree, init_state, make_eval, make_optimizer

SEEDS = (0, 1, 2)
TRAINED = "trained"


def models(settings: Settings, work: Path) -> dict[str, Path]:
    """The models' folders: the trained one, and those with outliers by their size."""
    names = [TRAINED, *map(str, settings.outliers)]
    return {name: work / "models" / name for name in names}


def commands(settings: Settings, work: Path, results: Path) -> dict[str, list[str]]:
    """The fine-tuning runs, those of a recipe in one process.

    The model without outliers is fine-tuned in bf16 only, for reference.
    """
    recipes = dict.fromkeys(name for name, _ in parity.ORDER)
    commands = {}
    for recipe in recipes:
        of_recipe = [
            _run(settings, work, results, name, recipe, seed)
            for seed in SEEDS
            for name in models(settings, work)
            if name != TRAINED or recipe == "bf16"
        ]
        file = work / "outliers" / f"{recipe}.json"
        commands[f"outliers-{recipe}"] = runs.command(of_recipe, file)
    return {name: command for name, command in commands.items() if command}


def _run(
    settings: Settings, work: Path, results: Path, model: str, recipe: str, seed: int
) -> Run:
    every = ("seq", "batch", "log_every", "steps", "eval_every")
    options = {name: settings.pretrain[name] for name in every} | settings.finetune
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
    """Writes `models` from the checkpoint of `parity`, and what became of them."""
    run = parity.base(settings, work, results)
    model, _, corpus = train.build(run.config)
    optimizer, _ = make_optimizer(run.config)
    state = init_state(model, optimizer, None, run.config.seed)
    state = checkpoint.restore(run.out / "checkpoints", state)
    seq = run.config.seq
    tokens = jnp.asarray(
        batches(corpus, "train", seq=seq, batch=settings.studied, seed=0)[0]
    )
    other = load_corpus(work / "corpus" / "cpp")
    texts = {
        domain: make_eval(
            model, batches(text, "val", seq=seq, batch=settings.studied, seed=0)
        )
        for domain, text in {"python": corpus, "cpp": other}.items()
    }

    def describe(params: PyTree, x: jax.Array) -> dict[str, object]:
        of = dataclasses.replace(state, params=params)
        return {
            "largest": float(jnp.abs(x).max()),
            "by_layer": jnp.abs(x).max(axis=(1, 2)).tolist(),
            "val_loss": {name: evaluate(of) for name, evaluate in texts.items()},
        }

    def input_of_down(params: PyTree) -> jax.Array:
        return operands(model.config, params, tokens)["down"].x

    x = input_of_down(state.params)
    params, facts = {TRAINED: state.params}, {TRAINED: describe(state.params, x)}
    for largest in settings.outliers:
        planted = plant(state.params, x, largest)
        params[str(largest)] = planted.params
        facts[str(largest)] = describe(
            planted.params, input_of_down(planted.params)
        ) | {
            "channels": planted.channels.tolist(),
            "factors": planted.factors.tolist(),
        }
    for name, folder in models(settings, work).items():
        if folder.exists():  # of a checkpoint that may have been another
            shutil.rmtree(folder)
        hf.save(folder, model.config, jax.device_get(params[name]))
        facts[name]["weights"] = runs.weights(folder)
    runs.save(facts, results / "planted.json")


if __name__ == "__main__":
    make_models(SETTINGS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
