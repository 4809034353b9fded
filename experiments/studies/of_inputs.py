"""Studies of the inputs of projections: their error, and the blocks that fall back."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from experiments.studies import emulate
from experiments.studies.operands import Operands
from experiments.studies.subject import Subject, cosine_distance
from fbq_jax import Recipe, Stats, dot_general, recipes

BITS = tuple(range(4, 17))
FALLBACK_BITS = tuple(range(4, 11))
RATE = 0.2

Criterion = Literal["absmax", "l1", "l1_rel"]
CRITERIA: tuple[Criterion, ...] = ("absmax", "l1", "l1_rel")
RATES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)

_MATMUL = (((1,), (0,)), ((), ()))


def error(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """Measures the relative rms error of a token, averaged over tokens and layers.

    The error of all values together would be dominated by the outliers.

    Returns:
        By projection: "plain", the errors for `BITS` bits in 128x128 blocks; and
        "fallback", the errors for `FALLBACK_BITS` bits with a second term of as many
        bits in a fraction `RATE` of the blocks.
    """
    return {
        name: {
            "plain": [float(_error(of.x, bits, 0.0)) for bits in BITS],
            "fallback": [float(_error(of.x, bits, RATE)) for bits in FALLBACK_BITS],
        }
        for name, of in subject.operands.items()
    }


@jax.jit
def _error(x: jax.Array, bits: int, rate: float) -> jax.Array:
    """The mean error of the tokens of ``x`` [L, M, K]."""
    values = jax.vmap(lambda x: emulate.quantize(x, bits, rate))(x)
    error, norm = jnp.linalg.norm(values - x, axis=2), jnp.linalg.norm(x, axis=2)
    return jnp.mean(error / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))


def criteria(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """Measures 1 - cosine of an output and the exact one, averaged over the layers.

    Returns:
        By projection and criterion: the distance for each of `RATES`.
    """

    def mean(of: Operands, rate: float, criterion: Criterion) -> float:
        layers = zip(of.x, of.w, strict=True)
        return float(sum(_distance(*xw, rate, criterion) for xw in layers) / len(of.x))

    return {
        name: {
            criterion: [mean(of, rate, criterion) for rate in RATES]
            for criterion in CRITERIA
        }
        for name, of in subject.operands.items()
    }


@functools.partial(jax.jit, static_argnums=3)
def _distance(
    x: jax.Array, w: jax.Array, rate: float, criterion: Criterion
) -> jax.Array:
    recipe = dataclasses.replace(recipes.fallback, criterion=criterion)
    metric = _block_stats(x, recipe).metric
    # Between the metrics of two blocks, because another program may sum a block's
    # metric in another order.
    ends = jnp.asarray([0.0, jnp.inf])
    ordered = jnp.sort(jnp.concatenate([metric.reshape(-1), ends]), descending=True)
    above = jnp.round(rate * metric.size).astype(jnp.int32)
    theta = (ordered[above] + ordered[above + 1]) / 2
    y, _ = dot_general(x, w, _MATMUL, recipe=recipe, theta=theta)
    return cosine_distance(y, x @ w)


def blocks(subject: Subject) -> dict[str, list[list[str]]]:
    """Maps the blocks of X at the threshold of the first batch.

    Returns:
        By projection and layer: for each block of tokens a string with one digit for
        each block of channels, "1" where the block falls back.
    """

    def lines(x: jax.Array) -> list[str]:
        return ["".join(map(str, row)) for row in _falls_back(x).tolist()]

    return {name: [lines(x) for x in of.x] for name, of in subject.operands.items()}


@jax.jit
def _falls_back(x: jax.Array) -> jax.Array:
    """1 where a block falls back, int32 [blocks of tokens, blocks of channels]."""
    stats = _block_stats(x, recipes.fallback)
    return (stats.metric[0] > stats.theta).astype(jnp.int32)


def _block_stats(x: jax.Array, recipe: Recipe) -> Stats:
    """The metric of the blocks of ``x`` and the threshold of a first batch."""
    # The statistics do not depend on the other operand.
    zeros = jnp.zeros((x.shape[1], 128), x.dtype)
    _, stats = dot_general(x, zeros, _MATMUL, recipe=recipe)
    return stats
