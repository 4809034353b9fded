"""Recipes that the library chooses: what they cost, and what was predicted.

    python -m experiments.choice planted --out FILE
    python -m experiments.choice speed --out FILE
    python -m experiments.choice pretraining --data FOLDER --out FILE

The first trains a Llama, plants outliers in two of its twelve layers, and goes on with
each recipe and with those that are chosen. The second compares the predicted gradients
of five Llamas with the measured ones. The third trains Llamas of 128 million and of a
billion parameters by each recipe and by those that are chosen.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fbq_jax
from examples.llama import choosing
from examples.llama.config import AUTO, Config
from examples.llama.data import batches, load_corpus
from examples.llama.loss import cross_entropy
from examples.llama.model import Layer, Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.projections import Part
from experiments import result_files, runs
from experiments.bench import harness
from experiments.settings import FULL, LARGER
from fbq_jax import FallbackDot, RulesDot, recipes
from fbq_jax.choice import ChoiceReport
from fbq_jax.choice.choosing import CANDIDATES

PLANTED = 3, 8  # layers
_FACTOR = 2.0**6  # of the channels that get outliers
_CHANNELS = 2
SEEDS = 0, 1
# The options of runs by the number of parameters.
SIZES: dict[str, dict[str, Any]] = {
    size: pretrain
    | {"steps": steps, "eval_every": steps, "save_every": 0, "check_every": 0}
    for size, pretrain, steps in (
        ("128M", FULL.pretrain, 256),
        ("1B", LARGER.pretrain, 64),
    )
}
# The shapes of `harness.Program`.
MODELS = (
    *((4096, 14336, 4, 8), (2048, 5632, 22, 4), (2048, 5632, 4, 4)),
    *((1024, 2816, 12, 8), (512, 1536, 8, 1)),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a model is trained before and after outliers are planted."""

    hidden: int = 1024
    intermediate: int = 2816
    seq: int = 1024
    batch: int = 16
    steps: int = 400
    more_steps: int = 100
    rate: float = 6e-4


class SeparateLayers(Part):
    """The loss of a Llama whose layers are no stack, so that each has its own rule."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the loss on tokens [B, S+1]."""
        config = self.config
        embed = nn.Embed(config.vocab_size, config.hidden_size, name="embed")
        x = embed(tokens[:, :-1]).astype(config.dtype)
        tables = config.rotary_tables(tokens.shape[1] - 1)
        for i in range(config.num_layers):
            x, _ = Layer(config, self.dot_general, name=f"layer_{i}")(x, tables)
        logits = self.dense(config.vocab_size, "lm_head", dot_general=None)(
            self.norm("norm")(x)
        )
        return cross_entropy(logits.astype(jnp.float32), tokens[:, 1:])


def train(
    model: SeparateLayers, params: Any, data: Any, optimizer: Any
) -> tuple[Any, Any, float]:
    """Takes a step for each batch; returns parameters, state and tokens per second."""
    state = model.init(jax.random.key(0), data[0]).get("fallback", {})

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, state: Any, moments: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "fallback": state}
            y, moved = model.apply(variables, tokens, mutable=["fallback"])
            return y, moved.get("fallback", {})

        grads, state_ = jax.grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state_, moments

    params = jax.tree.map(jnp.copy, params)
    moments = optimizer.init(params)
    start, tokens = time.perf_counter(), 0
    for n, batch in enumerate(data):
        if n == len(data) // 2:  # compiled and warm
            jax.block_until_ready(params)
            start, tokens = time.perf_counter(), 0
        params, state, moments = step(params, state, moments, batch)
        tokens += batch.shape[0] * (batch.shape[1] - 1)
    jax.block_until_ready(params)
    return params, state, tokens / (time.perf_counter() - start)


def plant(params: Any) -> Any:
    """Multiplies channels of `up` by a factor and divides the rows of `down` by it.

    In exact arithmetic, the model computes what it did.
    """
    params = jax.tree.map(jnp.copy, params)
    for layer in PLANTED:
        mlp = params[f"layer_{layer}"]["mlp"]
        up, down = mlp["gate_up"]["kernel"], mlp["down"]["kernel"]
        mlp["gate_up"]["kernel"] = up.at[:, 1, :_CHANNELS].multiply(_FACTOR)
        mlp["down"]["kernel"] = down.at[:_CHANNELS].divide(_FACTOR)
    return params


def planted(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The loss after further training from planted outliers, by recipe and seed."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=12,
        num_heads=sizes.hidden // 64,
        num_kv_heads=sizes.hidden // 64,
        max_seq_len=sizes.seq,
    )
    model, corpus = SeparateLayers(config), load_corpus(None)
    shape = {"seq": sizes.seq, "batch": sizes.batch}

    def data(part: Literal["train", "val"], count: int, seed: int) -> list[jax.Array]:
        found = batches(corpus, part, seed=seed, **shape)
        return [jnp.asarray(found[i]) for i in range(count)]

    first = data("train", sizes.steps, 0)
    params = jax.jit(model.init)(jax.random.key(0), first[0])["params"]
    schedule = optax.warmup_cosine_decay_schedule(0, sizes.rate, 20, sizes.steps)
    params, _, _ = train(model, params, first, optax.adamw(schedule))
    params = plant(params)
    variables: Any = {"params": params}
    rules, report = fbq_jax.choose_recipes(
        model, variables, first[-1], loss=lambda loss: loss, layers="layer_.*"
    )
    yield as_row(report)
    ops = {name: FallbackDot(recipes.NAMED[name]) for name in CANDIDATES}
    held_out = data("val", 16, 0)
    for seed in SEEDS:
        more = data("train", sizes.more_steps, 1 + seed)
        for name, op in {"bf16": None, **ops, "chosen": RulesDot(rules)}.items():
            bits = None if op is None else 10
            run = SeparateLayers(dataclasses.replace(config, saved_bits=bits), op)
            optimizer = optax.adamw(sizes.rate / 10)
            trained, state, per_s = train(run, params, more, optimizer)
            evaluate, variables = jax.jit(run.apply), {"params": trained}
            variables["fallback"] = state
            loss = np.mean([float(evaluate(variables, batch)) for batch in held_out])
            yield {"recipe": name, "seed": seed, "loss": loss, "tokens_per_s": per_s}


def speed() -> Iterator[dict[str, Any]]:
    """The predicted and the measured gradients of five Llamas."""
    for shape in MODELS:
        program = harness.Program("float", None, shape)
        (_, sequences, length), config = program.batch(), program.llama()
        model, key = Llama(config), jax.random.key(0)
        tokens = jax.random.randint(key, (sequences, length + 1), 0, config.vocab_size)
        params = jax.jit(model.init)(key, tokens[:, :-1])["params"]
        name = f"{config.hidden_size}, {config.num_layers} layers, {tokens.size} tokens"
        yield {"model": name} | as_row(choosing.choose(model, params, tokens))


def pretraining(
    data: Path, seeds: Sequence[int], sizes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The validation losses and the speeds of Llamas, by recipe and seed."""
    for seed in seeds:
        for size in sizes:
            for recipe in ("bf16", *CANDIDATES, AUTO):
                options = SIZES[size]
                config = Config(data=str(data), recipe=recipe, seed=seed, **options)
                found = runs.figures(config)
                figures = {k: found[k] for k in ("val_loss", "tokens_per_s")}
                figures["rules"] = found["options"]["recipe"]
                yield {"size": size, "recipe": recipe, "seed": seed, **figures}


def as_row(report: ChoiceReport) -> dict[str, Any]:
    """A report as JSON, with its prediction."""
    print(report, flush=True)
    stored = dataclasses.asdict(dataclasses.replace(report, look=None))
    return {"report": stored, "predicted_ms": report.predicted_ms}


COMMANDS: dict[str, Any] = {
    "planted": planted,
    "speed": speed,
    "pretraining": pretraining,
}


def main(argv: list[str] | None = None) -> None:
    """Runs an experiment and writes its rows, each as soon as it is there."""
    parser = argparse.ArgumentParser(prog="experiments.choice")
    commands = parser.add_subparsers(dest="command", required=True)
    of = {name: commands.add_parser(name) for name in COMMANDS}
    of["pretraining"].add_argument("--data", type=Path, required=True)
    of["pretraining"].add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    of["pretraining"].add_argument("--sizes", choices=SIZES, nargs="+", default=SIZES)
    for field in dataclasses.fields(Sizes):
        kind: Any = type(field.default)
        of["planted"].add_argument(f"--{field.name}", type=kind, default=field.default)
    for command in of.values():
        command.add_argument("--out", type=Path, required=True)
    asked = vars(parser.parse_args(argv))
    name, out = asked.pop("command"), asked.pop("out")
    if name == "planted":
        asked = {"sizes": Sizes(**asked)}
    rows = COMMANDS[name](**asked)
    result_files.save_rows(rows, out)


if __name__ == "__main__":
    main()
