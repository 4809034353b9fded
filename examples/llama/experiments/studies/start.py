"""How many batches the threshold needs to reach its range from different starts."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from examples.llama.experiments.probe import operands
from examples.llama.experiments.studies.block_metric import block_stats
from examples.llama.experiments.studies.subject import Subject
from examples.llama.step import PyTree
from fbq_jax import fallback_dot, fallback_stats, recipes

FACTORS = (0.001, 0.01, 0.1, 10.0, 100.0, 1000.0)  # of the first batch's threshold
FORWARDS = 24

# The threshold depends on the input only, so few output features are enough.
_LAYER = nn.Dense(128, use_bias=False, dot_general=fallback_dot)


def study(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """Follows the threshold of the input of `down` in the middle layer.

    Returns:
        By start, "first_batch" or one of `FACTORS`: the fallback rate ("rate") and the
        threshold ("theta", relative to the first batch's) in each of `FORWARDS`
        training forwards.
    """
    x = _input_of_down(subject, 0)
    first = float(block_stats(x, recipes.fallback).theta)
    factors = {"first_batch": 1.0} | {str(factor): factor for factor in FACTORS}
    fresh = jax.jit(_LAYER.init)(jax.random.key(0), x)
    states = {
        name: _with_theta(fresh, factor * first) for name, factor in factors.items()
    }
    result: dict[str, dict[str, list[float]]] = {
        name: {"rate": [], "theta": []} for name in states
    }
    for i in range(FORWARDS):
        x = _input_of_down(subject, i)
        for name, variables in states.items():
            before = _layer_stats(variables)
            states[name] = _forward(variables, x)
            result[name]["rate"].append(float(_layer_stats(states[name]).rate))
            result[name]["theta"].append(float(before.theta) / first)
    return result


def _input_of_down(subject: Subject, batch: int) -> jax.Array:
    tokens = jnp.asarray(subject.text[batch])
    x = operands(subject.config, subject.params, tokens)["down"].x
    return x[len(x) // 2]


def _with_theta(variables: PyTree, theta: float) -> PyTree:
    state = variables["fallback"]["dot_general"] | {"theta": jnp.float32(theta)}
    return variables | {"fallback": {"dot_general": state}}


def _layer_stats(variables: PyTree) -> PyTree:
    (stats,) = fallback_stats(variables).values()
    return stats


@jax.jit
def _forward(variables: PyTree, x: jax.Array) -> PyTree:
    """A training forward: the variables after it."""
    _, updates = _LAYER.apply(variables, x, mutable=["fallback"])
    return variables | updates
