"""The error of the gradient by bits, by where fallback applies, and by saved bits.

The error is 1 - cosine of the gradient and the exact one.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from examples.llama.experiments.studies import emulate, perplexity
from examples.llama.experiments.studies.subject import Subject, cosine_distance
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.step import PyTree

OPERANDS = ("x", "w", "dy")
BITS = (4, 5, 6, 7, 8, 10, 12)
RATES = (0.0, 0.1, 0.2, 0.3, 0.5)
SAVED_BITS = (4, 6, 8, 10, 12)  # each compiles a program


def operands(subject: Subject) -> dict[str, list[float]]:
    """Returns the errors with one operand quantized, by operand, for each of `BITS`."""
    distance = _distance(subject)
    return {
        operand: [distance(emulate.bits(**{operand: bits})) for bits in BITS]
        for operand in OPERANDS
    }


def passes(subject: Subject) -> dict[str, list[float]]:
    """Measures the error with X, W and dY in 8 bits, for each of `RATES`.

    Returns:
        "forward": blocks of X fall back in the forward product only. "both": they also
        fall back in dW. The error of W can hide the difference, so each variant is
        also measured with W in float.
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
    """Returns the errors of norms and gates that save each of `SAVED_BITS`."""
    exact = gradient(Llama(subject.config), subject.params, subject.text[0])

    def at(bits: int) -> float:
        config = dataclasses.replace(subject.config, saved_bits=bits)
        rounded = gradient(Llama(config), subject.params, subject.text[0])
        return float(cosine_distance(exact, rounded))

    return list(map(at, SAVED_BITS))


def _distance(subject: Subject) -> Callable[[emulate.Bits], float]:
    def emulated(how: emulate.Bits) -> PyTree:
        return _emulated(subject.config, subject.params, subject.text[0], how)

    exact = emulated(emulate.bits())
    return lambda how: float(cosine_distance(exact, emulated(how)))


@functools.partial(jax.jit, static_argnums=0)
def _emulated(
    config: LlamaConfig, params: PyTree, tokens: jax.Array, how: emulate.Bits
) -> PyTree:
    return gradient(Llama(config, emulate.dot_general(how)), params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def gradient(model: Llama, params: PyTree, tokens: jax.Array) -> PyTree:
    """The gradient with respect to the parameters of the layers."""

    def loss(layers: PyTree) -> jax.Array:
        return perplexity.loss(model, {**params, "layers": layers}, tokens)

    return jax.grad(loss)(params["layers"])
