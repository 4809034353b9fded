"""The models of the studies and of fine-tuning: trained, and with planted outliers.

Planting does not change the function that a model computes.

In a gated MLP, `down(silu(gate(x)) * up(x))`, a channel of `up` is multiplied by a
power of two, and its row of `down` is divided by it. All products and sums stay the
same bit for bit, but the input of `down` grows in that channel. The chosen channels
have a gate that opens for few tokens, so that the outliers are sparse in both channels
and tokens, as in large models.

In the same way, dividing a channel of `up` and multiplying its row of `down` makes
outliers in the gradient of the output of `up`, and in the weights of `down`.
"""

import dataclasses
import functools
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.llama import hf
from examples.llama.build import build, last_state
from examples.llama.data import batches, load_corpus
from examples.llama.step import PyTree, evaluate
from experiments import result_files, runs
from experiments.settings import GRADIENTS, TRAINED, Experiment
from experiments.studies.operands import Operands, operands

CHANNELS = 4  # per layer
_CANDIDATES = 64


class Planted(NamedTuple):
    """A model with outliers."""

    params: PyTree
    channels: jax.Array  # int32 [L, CHANNELS]
    factors: jax.Array  # of `up`, powers of two, float32 [L, CHANNELS]


def are_made(experiment: Experiment) -> bool:
    """Whether all models and their description exist."""
    folders = map(experiment.model, experiment.settings.models)
    files = [*folders, experiment.results / "planted.json"]  # written last
    return all(file.exists() for file in files)


def make(experiment: Experiment) -> None:
    """Writes the models from the checkpoint of `runs.BASE`, and `planted.json`.

    A checkpoint is too large to store with the results, so another machine trains that
    run again.
    """
    settings, (run,) = experiment.settings, runs.pretraining(experiment)[runs.BASE]
    if not (run.out / "checkpoints" / str(run.config.steps)).exists():
        run.train()
    model, _, corpus = build(run.config)
    state = last_state(run.config, run.out)
    sizes = {"seq": run.config.seq, "batch": settings.studied, "seed": 0}
    tokens = jnp.asarray(batches(corpus, "train", **sizes)[0])
    texts = {"python": corpus, "cpp": load_corpus(experiment.text("cpp"))}
    data = {domain: batches(text, "val", **sizes) for domain, text in texts.items()}

    def describe(params: PyTree) -> dict[str, object]:
        of = operands(model.config, params, tokens)
        peaks = jnp.abs(of["down"].x).max(axis=(1, 2))
        changed = dataclasses.replace(state, params=params)
        return {
            "largest": float(peaks.max()),
            "by_layer": peaks.tolist(),
            "gradient_ratio": float(_peak_over_rms(gradient_of_up(of))),
            "val_loss": {name: evaluate(model, changed, x) for name, x in data.items()},
        }

    of = operands(model.config, state.params, tokens)
    planted = {
        str(largest): plant(state.params, of["down"].x, largest)
        for largest in settings.outliers
    }
    if (factor := settings.gradient_factor) is not None:
        dy = gradient_of_up(of)
        planted[GRADIENTS] = plant_gradients(state.params, dy, factor)
    params = {TRAINED: state.params} | {n: made.params for n, made in planted.items()}
    facts = {name: describe(of_model) for name, of_model in params.items()}
    for name, made in planted.items():
        facts[name]["channels"] = made.channels.tolist()
        facts[name]["factors"] = made.factors.tolist()
    for name in settings.models:
        if (folder := experiment.model(name)).exists():  # from another checkpoint
            shutil.rmtree(folder)
        hf.save(folder, model.config, jax.device_get(params[name]))
        facts[name]["weights"] = runs.weights(folder)
    result_files.save(facts, experiment.results / "planted.json")


def gradient_of_up(of: dict[str, Operands]) -> jax.Array:
    """Returns the gradient of the output of `up`, [L, M, F]."""
    return of["gate_up"].dy[..., of["down"].x.shape[-1] :]


def _peak_over_rms(x: jax.Array) -> jax.Array:
    """The most that a layer's largest magnitude exceeds its root mean square."""
    x = x.astype(jnp.float32)
    return (jnp.abs(x).max(axis=(1, 2)) / jnp.sqrt((x**2).mean(axis=(1, 2)))).max()


@functools.partial(jax.jit, static_argnums=2)
def plant_gradients(params: PyTree, dy: jax.Array, factor: int) -> Planted:
    """Plants outliers in the gradient of the output of `up`, and in `down`.

    Args:
        params: The parameters of `Llama`.
        dy: This gradient for some text, [L, M, F].
        factor: A power of two by which the gradient grows in the chosen channels.
    """
    dy = jnp.abs(dy.astype(jnp.float32))
    _, channels = jax.lax.top_k(_concentration(dy), CHANNELS)
    factors = jnp.full(channels.shape, jnp.float32(1 / factor))
    return _planted(params, channels, factors)


@jax.jit
def plant(params: PyTree, x: jax.Array, largest: float | jax.Array) -> Planted:
    """Plants outliers.

    Args:
        params: The parameters of `Llama`.
        x: The input of `down` for some text, [L, M, F].
        largest: The target for `max |x|` of each chosen channel on this text, or one
            for each layer [L, 1], reached within a factor of sqrt(2). A channel that is
            larger already is unchanged.
    """
    x = jnp.abs(x.astype(jnp.float32))
    peak = x.max(axis=1)
    number = min(_CANDIDATES, x.shape[2])
    _, candidates = jax.lax.top_k(_concentration(x), number)
    needed = jnp.log2(largest / jnp.take_along_axis(peak, candidates, axis=1))
    # Choose the candidates that a power of two brings closest to the target.
    # Candidates that are large enough already come last and stay unchanged.
    distance = jnp.where(needed > 0.5, jnp.abs(needed - jnp.round(needed)), jnp.inf)
    needed = jnp.maximum(needed, 0.0)
    _, best = jax.lax.top_k(-distance, CHANNELS)
    channels = jnp.take_along_axis(candidates, best, axis=1)
    powers = jnp.round(jnp.take_along_axis(needed, best, axis=1)).astype(jnp.int32)
    factors = jnp.ldexp(jnp.float32(1.0), powers)  # exp2 is not exact
    return _planted(params, channels, factors)


def _concentration(x: jax.Array) -> jax.Array:
    """How much larger than their mean the channels of magnitudes [L, M, F] get."""
    return x.max(axis=1) / jnp.maximum(x.mean(axis=1), jnp.finfo(jnp.float32).tiny)


def _planted(params: PyTree, channels: jax.Array, factors: jax.Array) -> Planted:
    """Multiplies channels of `up` by factors, and divides rows of `down` by them."""
    mlp = params["layers"]["mlp"]
    layers = jnp.arange(len(channels))[:, None]
    scale = jnp.ones(mlp["down"]["kernel"].shape[:2], jnp.float32)
    scale = scale.at[layers, channels].set(factors)
    gate_up = jnp.asarray(mlp["gate_up"]["kernel"])
    gate_up = gate_up.at[:, :, 1].multiply(scale[:, None])
    down = mlp["down"]["kernel"] / scale[:, :, None]
    mlp = mlp | {"gate_up": {"kernel": gate_up}, "down": {"kernel": down}}
    params = params | {"layers": params["layers"] | {"mlp": mlp}}
    return Planted(params, channels, factors)
