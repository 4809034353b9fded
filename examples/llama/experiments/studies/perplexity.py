"""Perplexity by the size of a block, with and without fallback."""

import functools
import math

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.subject import Subject
from examples.llama.model import Llama
from examples.llama.step import EVAL_BATCHES, PyTree, cross_entropy
from fbq_jax import FallbackDot, Recipe
from fbq_jax.recipes.schema import BLOCK_SIDES


def study(subject: Subject) -> dict[str, float | list[float]]:
    """Of the model in float32, and of its projections in INT8.

    Returns:
        "float"; "block" and "fallback", for each of `BLOCK_SIDES`. A layer's threshold
        is that of its own blocks, which puts the rate into the middle of the range.
    """
    return {
        "float": _perplexity(subject, Llama(subject.config)),
        "block": [
            of_recipe(subject, Recipe(block=b, criterion=None)) for b in BLOCK_SIDES
        ],
        "fallback": [of_recipe(subject, Recipe(block=b)) for b in BLOCK_SIDES],
    }


def of_recipe(subject: Subject, recipe: Recipe) -> float:
    """With projections by a recipe."""
    return _perplexity(subject, Llama(subject.config, FallbackDot(recipe)))


def _perplexity(subject: Subject, model: Llama) -> float:
    batches = [jnp.asarray(subject.text[i]) for i in range(EVAL_BATCHES)]
    loss = sum(float(_loss(model, subject.params, batch)) for batch in batches)
    return math.exp(loss / len(batches))


@functools.partial(jax.jit, static_argnums=0)
def _loss(model: Llama, params: PyTree, tokens: jax.Array) -> jax.Array:
    # Where the state is mutable it starts anew: with thresholds that are not known.
    logits, _ = model.apply({"params": params}, tokens[:, :-1], mutable=["fallback"])
    return cross_entropy(logits, tokens[:, 1:])
