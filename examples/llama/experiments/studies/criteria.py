"""How far a projection's output is off, by the share of blocks that fall back.

By each criterion for which blocks these are. All is computed by the library.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.subject import Subject, cosine_distance
from fbq_jax import dot_general, ops, recipes
from fbq_jax.kernels.reference import CRITERIA, Criterion

RATES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
_MATMUL = (((1,), (0,)), ((), ()))


def study(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """The mean over the layers of 1 - cosine of the output and the exact one.

    Returns:
        By projection and criterion, for each of `RATES`.
    """
    return {
        name: {
            criterion: [
                float(
                    sum(_distance(x, w, rate, criterion) for x, w in layers)
                    / len(layers)
                )
                for rate in RATES
            ]
            for criterion in CRITERIA
        }
        for name, of in subject.operands.items()
        for layers in [list(zip(of.x, of.w, strict=True))]
    }


@functools.partial(jax.jit, static_argnums=3)
def _distance(
    x: jax.Array, w: jax.Array, rate: float, criterion: Criterion
) -> jax.Array:
    recipe = dataclasses.replace(recipes.fallback, criterion=criterion)
    metric = ops.block_metric(x[None], block=recipe.lhs_block, criterion=criterion)
    # Between two blocks' metrics, which the product may sum in another order, for as
    # many blocks as the rate says.
    ends = jnp.asarray([0.0, jnp.inf])
    ordered = jnp.sort(jnp.concatenate([metric.reshape(-1), ends]), descending=True)
    above = jnp.round(rate * metric.size).astype(jnp.int32)
    theta = (ordered[above] + ordered[above + 1]) / 2
    y, _ = dot_general(x, w, _MATMUL, recipe=recipe, theta=theta)
    return cosine_distance(y, x @ w)
