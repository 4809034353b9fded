"""Perplexity by the size of a block, with and without fallback."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.subject import Subject
from examples.llama.model import Llama
from examples.llama.step import EVAL_BATCHES, PyTree, cross_entropy
from fbq_jax import FallbackDot, Recipe
from fbq_jax.recipe import BLOCK_SIDES


def study(subject: Subject) -> dict[str, float | list[float]]:
    """Of the model in float32, and of its projections in INT8.

    Returns:
        "float"; "block" and "fallback", for each of `BLOCK_SIDES`. A layer's threshold
        is that of its own blocks, which puts the rate into the middle of the range.
    """
    return {
        "float": _perplexity(subject, Llama(subject.config)),
        "block": [_of(subject, Recipe(block=b, criterion=None)) for b in BLOCK_SIDES],
        "fallback": [_of(subject, Recipe(block=b)) for b in BLOCK_SIDES],
    }


def _of(subject: Subject, recipe: Recipe) -> float:
    return _perplexity(subject, Llama(subject.config, FallbackDot(recipe)))


def _perplexity(subject: Subject, model: Llama) -> float:
    batches = [jnp.asarray(subject.text[i]) for i in range(EVAL_BATCHES)]
    # As the layers' state starts: with thresholds that are not known.
    state = jax.jit(model.init)(jax.random.key(0), batches[0][:1, :1])
    variables = {**state, "params": subject.params}
    loss = sum(float(_loss(model, variables, batch)) for batch in batches)
    return math.exp(loss / len(batches))


@functools.partial(jax.jit, static_argnums=0)
def _loss(model: Llama, variables: PyTree, tokens: jax.Array) -> jax.Array:
    logits: Any = model.apply(variables, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])
