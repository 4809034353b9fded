"""Studies of whole models: the error of the gradient, and the perplexity.

The error is 1 - cosine of the gradient and the exact one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from examples.llama.loss import cross_entropy
from examples.llama.model import Llama
from examples.llama.step import EVAL_BATCHES, PyTree
from experiments.studies import emulate
from experiments.studies.emulate import Bits
from experiments.studies.subject import Subject, cosine_distance
from fbq_jax import FallbackDot, Recipe, recipes

OPERANDS = ("x", "w", "dy")
BITS = (4, 5, 6, 7, 8, 10, 12)
RATES = (0.0, 0.1, 0.2, 0.3, 0.5)
PASSES = "forward", "forward, W in floats"
SAVED_BITS = (4, 6, 8, 10, 12)  # each compiles a program
BLOCK_SIDES = (32, 64, 128, 256)
RECIPES = (
    *("fallback", "block", "row_block_lhs", "fp8_row_block_lhs", "jetfire"),
    "rowwise",
)
FLOAT = "float32"


def operands(subject: Subject) -> dict[str, list[float]]:
    """Returns the errors with one operand quantized, by operand, for each of `BITS`."""
    distance = _distance(subject)
    return {
        operand: [distance(Bits(**{operand: bits})) for bits in BITS]
        for operand in OPERANDS
    }


def passes(subject: Subject) -> dict[str, list[float]]:
    """Measures the error with 8 bits and fallback in the forward product.

    Returns:
        The errors for each of `RATES`, with W in 8 bits, too, and with W in float,
        because the error of W can hide the others.
    """
    distance = _distance(subject)
    return {
        name: [distance(Bits(x=8, w=w, dy=8, rate=rate)) for rate in RATES]
        for name, w in zip(PASSES, (8, emulate.FLOAT), strict=True)
    }


def _distance(subject: Subject) -> Callable[[Bits], float]:
    @jax.jit
    def emulated(params: PyTree, how: Bits) -> PyTree:
        model = Llama(subject.config, emulate.dot_general(how))
        return _gradient(model, params, subject.text[0])

    exact = emulated(subject.params, Bits())
    return lambda how: float(cosine_distance(exact, emulated(subject.params, how)))


@functools.partial(jax.jit, static_argnums=0)
def _gradient(model: Llama, params: PyTree, tokens: jax.Array) -> PyTree:
    """The gradient with respect to the parameters of the layers."""

    def loss(layers: PyTree) -> jax.Array:
        return _loss(model, {**params, "layers": layers}, tokens)

    return jax.grad(loss)(params["layers"])


def nonlinear(subject: Subject) -> list[float]:
    """Returns the errors of norms and gates that save each of `SAVED_BITS`."""
    exact = _gradient(Llama(subject.config), subject.params, subject.text[0])

    def at(bits: int) -> float:
        config = dataclasses.replace(subject.config, saved_bits=bits)
        rounded = _gradient(Llama(config), subject.params, subject.text[0])
        return float(cosine_distance(exact, rounded))

    return list(map(at, SAVED_BITS))


def perplexity(subject: Subject) -> dict[str, float | list[float]]:
    """Measures the perplexity in float32 and with INT8 projections.

    Returns:
        "float": the perplexity in float32. "block" and "fallback": the perplexities for
        each of `BLOCK_SIDES`. The threshold of a layer is the quantile of its own
        blocks, which puts the fallback rate in the middle of the range.
    """
    fallback = [Recipe(block=side) for side in BLOCK_SIDES]
    block = [Recipe(block=side, criterion=None) for side in BLOCK_SIDES]
    return {
        "float": _perplexity(subject, Llama(subject.config)),
        "block": [_perplexity(subject, _quantized(subject, r)) for r in block],
        "fallback": [_perplexity(subject, _quantized(subject, r)) for r in fallback],
    }


def by_recipe(subject: Subject) -> dict[str, dict[str, float]]:
    """Measures a model in float32 and with recipes, which round as in training.

    Returns:
        By recipe, and for `FLOAT`: "perplexity", and "gradient", the error. The
        threshold of a layer is the quantile of its own blocks.
    """
    models = {FLOAT: Llama(subject.config)}
    models |= {name: _quantized(subject, recipes.NAMED[name]) for name in RECIPES}
    exact = _gradient(models[FLOAT], subject.params, subject.text[0])
    found = {}
    for name, model in models.items():
        gradient = _gradient(model, subject.params, subject.text[0])
        found[name] = {
            "perplexity": _perplexity(subject, model),
            "gradient": float(cosine_distance(exact, gradient)),
        }
    return found


def _quantized(subject: Subject, recipe: Recipe) -> Llama:
    return Llama(subject.config, FallbackDot(recipe))


def _perplexity(subject: Subject, model: Llama) -> float:
    batches = [jnp.asarray(subject.text[i]) for i in range(EVAL_BATCHES)]
    total = sum(float(_loss(model, subject.params, batch)) for batch in batches)
    return math.exp(total / len(batches))


@functools.partial(jax.jit, static_argnums=0)
def _loss(model: Llama, params: PyTree, tokens: jax.Array) -> jax.Array:
    """The loss in nats per token of tokens [B, S+1]."""
    # With the state of a new model each batch sets its own thresholds.
    inputs = tokens[:, :-1]
    variables = {**model.init(jax.random.key(0), inputs), "params": params}
    logits, _ = model.apply(variables, inputs, mutable=["fallback"])
    return cross_entropy(logits, tokens[:, 1:])
