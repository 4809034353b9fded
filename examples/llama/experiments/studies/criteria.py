"""The error of a projection's output by fallback rate and criterion.

The library computes the outputs and the metrics of the criteria.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.block_metric import MATMUL, block_stats
from examples.llama.experiments.studies.subject import Subject, cosine_distance
from fbq_jax import dot_general, recipes

Criterion = Literal["absmax", "l1", "l1_rel"]
CRITERIA: tuple[Criterion, ...] = ("absmax", "l1", "l1_rel")
RATES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def study(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """Measures 1 - cosine of the output and the exact one, averaged over the layers.

    Returns:
        By projection and criterion: the distance for each of `RATES`.
    """
    return {
        name: {
            criterion: [_mean_distance(of.x, of.w, rate, criterion) for rate in RATES]
            for criterion in CRITERIA
        }
        for name, of in subject.operands.items()
    }


def _mean_distance(
    x: jax.Array, w: jax.Array, rate: float, criterion: Criterion
) -> float:
    layers = zip(x, w, strict=True)
    total = sum(_distance(*layer, rate, criterion) for layer in layers)
    return float(total / len(x))


@functools.partial(jax.jit, static_argnums=3)
def _distance(
    x: jax.Array, w: jax.Array, rate: float, criterion: Criterion
) -> jax.Array:
    recipe = dataclasses.replace(recipes.fallback, criterion=criterion)
    metric = block_stats(x, recipe).metric
    # Between the metrics of two blocks, because another program may sum a block's
    # metric in another order.
    ends = jnp.asarray([0.0, jnp.inf])
    ordered = jnp.sort(jnp.concatenate([metric.reshape(-1), ends]), descending=True)
    above = jnp.round(rate * metric.size).astype(jnp.int32)
    theta = (ordered[above] + ordered[above + 1]) / 2
    y, _ = dot_general(x, w, MATMUL, recipe=recipe, theta=theta)
    return cosine_distance(y, x @ w)
