"""A model that was trained elsewhere: its outliers, and what recipes cost it.

    python -m experiments.checkpoint outliers MODEL TEXT --out FILE
    python -m experiments.checkpoint losses MODEL TEXT --out FILE
    python -m experiments.checkpoint schemes MODEL TEXT --out FILE
    python -m experiments.checkpoint exported MODEL TEXT --out FILE
    python -m experiments.checkpoint tuned MODEL TEXT --out FILE

MODEL is what the Llama's ``--from-hf`` takes, and TEXT what its ``--data`` takes. The
second quantizes the model without training, by each recipe; the third rounds operands
of its forward products as no recipe does yet; the fourth reads exports of the model
back; the last trains it. ``--planted N`` gives the second and the third a model that
has outliers of N root mean squares and computes the same function.
"""

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama import choosing, hf
from examples.llama.config import AUTO, RECIPES, Config
from examples.llama.data import load_corpus
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.text import tokenizer_source
from experiments import models, result_files, runs, second_terms
from experiments.studies.operands import operands
from fbq_jax import FallbackDot, RulesDot, recipes
from fbq_jax.choice.products import outliers as stand_out
from fbq_jax.export import ExportError

_TOKENS = 513  # of a sequence
_PAIR = 2  # sequences of a call
_SETTLING = 8  # calls until thresholds stay in their range
# The recipes of training, unless others are asked for.
TUNED = (
    *("bf16", "fallback", "row_block_lhs", "block", "fp8_row_block_lhs", "rowwise"),
    AUTO,
)
SEEDS = 0, 1, 2
# The name, further figures, and the loss of each pair of sequences.
Losses = Iterator[tuple[str, dict[str, Any], list[float]]]
TUNING: dict[str, Any] = {"seq": 512, "batch": 8, "steps": 200, "lr": 2e-5} | {
    "eval_every": 200,
    "log_every": 20,
    "check_every": 0,
    "save_every": 0,
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model, and text in pairs of sequences.

    Attributes:
        model: Its folder or file.
        config: Its sizes.
        params: Its weights.
        pairs: Token ids, int32 [pairs, 2, 513].
    """

    model: Path
    config: LlamaConfig
    params: Any
    pairs: np.ndarray

    def losses(self, op: Any) -> list[float]:
        """The loss of each pair with a ``dot_general``, after its state has settled."""
        model = Llama(self.config, op)

        @functools.partial(jax.jit, static_argnums=3)
        def loss(params: Any, state: Any, tokens: jax.Array, moves: bool) -> Any:
            variables, mutable = {"params": params, **state}, ["fallback"] * moves
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            return model.apply(variables, inputs, targets=targets, mutable=mutable)

        state = state_of(model, self.pairs[0])
        for pair in self.pairs[:_SETTLING] if state else ():
            state |= loss(self.params, state, pair, True)[1]
        return [float(loss(self.params, state, p, False)[0]) for p in self.pairs]


def state_of(model: Llama, tokens: Any) -> dict[str, Any]:
    """The collections of a new model without its parameters."""

    @jax.jit
    def init() -> dict[str, Any]:
        variables = model.init(jax.random.key(0), tokens[:, :-1])
        return {name: x for name, x in variables.items() if name != "params"}

    return init()


def load(model: Path, pairs: np.ndarray) -> Checkpoint:
    """Loads a model."""
    config, params = hf.load(model)
    return Checkpoint(model, config, jax.device_put(params), pairs)


def read_pairs(model: Path, text: Path, sequences: int) -> np.ndarray:
    """Evenly spaced sequences of a text in the tokens of a model."""
    ids = load_corpus(text, hf.load_tokenizer(model)).train
    ids = ids[: len(ids) // _TOKENS * _TOKENS].reshape(-1, _TOKENS)
    count = min(sequences, len(ids)) // _PAIR * _PAIR
    chosen = ids[np.linspace(0, len(ids) - 1, count).astype(int)]
    return chosen.astype(np.int32).reshape(-1, _PAIR, _TOKENS)


def plant(checkpoint: Checkpoint, size: float) -> Checkpoint:
    """The same function, with outliers in the input of each layer's `down`.

    They reach about ``size`` times the input's root mean square without them, in the
    first pair of sequences.
    """
    config = dataclasses.replace(checkpoint.config, dtype=jnp.float32)
    x = operands(config, checkpoint.params, jnp.asarray(checkpoint.pairs[0]))["down"].x
    largest = size * jnp.sqrt(jnp.square(x).mean(axis=(1, 2)))[:, None]
    planted = models.plant(checkpoint.params, x, largest)
    return dataclasses.replace(checkpoint, params=planted.params)


def outliers(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """What stands out in the input of each projection, in one pair of sequences."""
    config = dataclasses.replace(checkpoint.config, dtype=jnp.float32)
    found = operands(config, checkpoint.params, jnp.asarray(checkpoint.pairs[0]))
    for name, of in found.items():
        for layer, x in enumerate(of.x):
            largest, share = map(float, stand_out(x[None]))
            yield {"what": name, "layer": layer, "largest": largest, "share": share}


def compared(found: Losses) -> Iterator[dict[str, Any]]:
    """Rows with what each adds to the losses of the first, and its standard error."""
    first: list[float] = []
    for what, more, losses in found:
        first = first or losses
        added = np.subtract(losses, first)
        error = float(added.std(ddof=1) / len(added) ** 0.5)
        figures = {"added": float(added.mean()), "standard_error": error}
        yield {"what": what, **more, **figures, "losses": losses}


def losses(checkpoint: Checkpoint) -> Losses:
    """The losses of a model that is quantized without training, by recipe."""
    yield "bf16", {}, checkpoint.losses(None)
    for name, recipe in recipes.NAMED.items():
        yield name, {}, checkpoint.losses(FallbackDot(recipe))
    tokens = jnp.asarray(checkpoint.pairs[0])
    report = choosing.choose(Llama(checkpoint.config), checkpoint.params, tokens)
    rules = {pattern: str(recipe) for pattern, recipe in report.rules.items()}
    found = checkpoint.losses(RulesDot(report.rules))
    yield "chosen", {"rules": rules}, found


def schemes(checkpoint: Checkpoint) -> Losses:
    """The losses with rounded operands, by scheme."""
    yield "bf16", {}, checkpoint.losses(None)
    for name, scheme in second_terms.schemes().items():
        product = functools.partial(second_terms.dot_general, scheme)
        yield name, {}, checkpoint.losses(product)


def exported(checkpoint: Checkpoint) -> Losses:
    """The losses of exports in each format that takes the model, as floats."""
    yield "bf16", {}, checkpoint.losses(None)
    model = Llama(checkpoint.config, FallbackDot(recipes.row_block_lhs))
    variables = {**state_of(model, checkpoint.pairs[0]), "params": checkpoint.params}
    run = Config(from_hf=str(checkpoint.model))
    for name in hf.FORMATS:
        source = tokenizer_source(run, checkpoint.config)
        with tempfile.TemporaryDirectory() as folder, source as like:
            out = Path(folder, name)
            try:
                hf.export(out, name, model, variables, like=like)
            except ExportError as error:
                print(f"without {name}: {error}", file=sys.stderr)
                continue
            read = load(next(out.glob("*.gguf"), out), checkpoint.pairs)
        yield name, {}, read.losses(None)


def tuned(
    model: Path, text: Path, seeds: Sequence[int], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The validation losses of training by recipe and seed."""
    for seed in seeds:
        for recipe in names:
            config = Config(
                from_hf=str(model), data=str(text), recipe=recipe, seed=seed, **TUNING
            )
            found, kept = runs.figures(config), ("val_loss", "loss", "tokens_per_s")
            yield {"what": recipe, "seed": seed} | {key: found[key] for key in kept}


def main(argv: list[str] | None = None) -> None:
    """Runs an experiment and writes its rows, each as soon as it is there."""
    parser = argparse.ArgumentParser(prog="experiments.checkpoint")
    of: dict[str, Callable[[Checkpoint], Any]] = {
        "outliers": outliers,
        "losses": lambda checkpoint: compared(losses(checkpoint)),
        "schemes": lambda checkpoint: compared(schemes(checkpoint)),
        "exported": lambda checkpoint: compared(exported(checkpoint)),
    }
    parser.add_argument("command", choices=(*of, "tuned"))
    for name in ("model", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options: Any = {"choices": (*RECIPES, AUTO), "metavar": "RECIPE", "nargs": "+"}
    parser.add_argument("--recipes", default=TUNED, **options)
    parser.add_argument("--planted", type=float, help="root mean squares of outliers")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(argv)
    if asked.planted and asked.command not in ("losses", "schemes"):
        parser.error("--planted is an option of losses and schemes")
    if asked.command == "tuned":
        rows = tuned(asked.model, asked.text, asked.seeds, asked.recipes)
    else:
        pairs = read_pairs(asked.model, asked.text, asked.sequences)
        checkpoint = load(asked.model, pairs)
        if asked.planted:
            checkpoint = plant(checkpoint, asked.planted)
        rows = of[asked.command](checkpoint)
    result_files.save_rows(rows, asked.out)


if __name__ == "__main__":
    main()
