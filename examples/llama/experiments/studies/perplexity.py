"""Perplexity by block size, with and without fallback."""

import functools
import math

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.subject import Subject
from examples.llama.model import Llama
from examples.llama.step import EVAL_BATCHES, PyTree, cross_entropy
from fbq_jax import FallbackDot, Recipe

BLOCK_SIDES = (32, 64, 128, 256)


def study(subject: Subject) -> dict[str, float | list[float]]:
    """Measures the perplexity in float32 and with INT8 projections.

    Returns:
        "float": the perplexity in float32. "block" and "fallback": the perplexities for
        each of `BLOCK_SIDES`. The threshold of a layer is the quantile of its own
        blocks, which puts the fallback rate in the middle of the range.
    """
    return {
        "float": of_model(subject, Llama(subject.config)),
        "block": [
            with_recipe(subject, Recipe(block=side, criterion=None))
            for side in BLOCK_SIDES
        ],
        "fallback": [with_recipe(subject, Recipe(block=b)) for b in BLOCK_SIDES],
    }


def with_recipe(subject: Subject, recipe: Recipe) -> float:
    """Returns the perplexity with the projections in INT8."""
    return of_model(subject, Llama(subject.config, FallbackDot(recipe)))


def of_model(subject: Subject, model: Llama) -> float:
    """Returns the perplexity of a model with the subject's parameters."""
    batches = [jnp.asarray(subject.text[i]) for i in range(EVAL_BATCHES)]
    total = sum(float(loss(model, subject.params, batch)) for batch in batches)
    return math.exp(total / len(batches))


@functools.partial(jax.jit, static_argnums=0)
def loss(model: Llama, params: PyTree, tokens: jax.Array) -> jax.Array:
    """Returns the loss in nats per token of tokens [B, S+1]."""
    # With the state of a new model each batch sets its own thresholds.
    inputs = tokens[:, :-1]
    variables = {**model.init(jax.random.key(0), inputs), "params": params}
    logits, _ = model.apply(variables, inputs, mutable=["fallback"])
    return cross_entropy(logits, tokens[:, 1:])
