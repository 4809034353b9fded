"""1 - cosine of the gradient and the exact one, by bits of each operand.

And by where fallback is: in the product Y, as the method has it, or in dW as well.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from examples.llama.experiments.studies import emulate
from examples.llama.experiments.studies.subject import Subject, cosine_distance
from examples.llama.model import Llama, LlamaConfig
from examples.llama.step import PyTree, cross_entropy

OPERANDS = ("x", "w", "dy")
BITS = (4, 5, 6, 7, 8, 10, 12)
RATES = (0.0, 0.1, 0.2, 0.3, 0.5)
SAVED_BITS = (4, 6, 8, 10, 12)  # each a program of its own


def operands(subject: Subject) -> dict[str, list[float]]:
    """With one operand quantized in all projections: for each of `BITS`."""
    distance = _distance(subject)
    return {
        operand: [distance(emulate.bits(**{operand: bits})) for bits in BITS]
        for operand in OPERANDS
    }


def passes(subject: Subject) -> dict[str, list[float]]:
    """With X, W and dY in 8 bits: for each of `RATES`.

    Returns:
        "forward", where the share of X's blocks falls back in Y, and "both", where it
        does in dW too; and both with W in floats, for what W loses may hide it.
    """
    distance = _distance(subject)

    def at(rate: float, w: int, *, both: bool) -> float:
        backward = rate if both else 0.0
        how = emulate.bits(x=8, w=w, dy=8, forward=rate, backward=backward)
        return distance(how)

    return {
        where + of_w: [at(rate, w, both=where == "both") for rate in RATES]
        for of_w, w in (("", 8), (", W in floats", emulate.FLOAT))
        for where in ("forward", "both")
    }


def nonlinear(subject: Subject) -> list[float]:
    """With norms and gates that keep so few bits: for each of `SAVED_BITS`."""
    exact = _gradient(Llama(subject.config), subject.params, subject.text[0])

    def at(bits: int) -> float:
        config = dataclasses.replace(subject.config, saved_bits=bits)
        gradient = _gradient(Llama(config), subject.params, subject.text[0])
        return float(cosine_distance(exact, gradient))

    return list(map(at, SAVED_BITS))


def _distance(subject: Subject) -> Callable[[emulate.Bits], float]:
    def gradient(how: emulate.Bits) -> PyTree:
        return _emulated(subject.config, subject.params, subject.text[0], how)

    exact = gradient(emulate.bits())
    return lambda how: float(cosine_distance(exact, gradient(how)))


@functools.partial(jax.jit, static_argnums=0)
def _emulated(
    config: LlamaConfig, params: PyTree, tokens: jax.Array, how: emulate.Bits
) -> PyTree:
    return _gradient(Llama(config, emulate.dot_general(how)), params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(model: Llama, params: PyTree, tokens: jax.Array) -> PyTree:
    """With respect to the layers' parameters."""

    def loss(layers: PyTree) -> jax.Array:
        variables = {"params": {**params, "layers": layers}}
        logits: Any = model.apply(variables, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    return jax.grad(loss)(params["layers"])
