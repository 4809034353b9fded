"""How the threshold finds its range: from the first batch, or from a wrong start."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from examples.llama.experiments.probe import operands
from examples.llama.experiments.studies.subject import Subject
from fbq_jax import ops, recipes
from fbq_jax.core import threshold

FACTORS = (0.001, 0.01, 0.1, 10.0, 100.0, 1000.0)  # times the first batch's
FORWARDS = 24


def study(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """The input of `down` in the middle layer, of one batch after another.

    Returns:
        By the start, "first_batch" or one of `FACTORS`: "rate" and "theta" (over the
        first batch's) of each of `FORWARDS` training forwards.
    """
    recipe = recipes.fallback
    assert recipe.criterion is not None
    of_batches = []
    for i in range(FORWARDS):
        tokens = jnp.asarray(subject.text[i])
        x = operands(subject.config, subject.params, tokens)["down"].x
        of_batches.append(
            ops.block_metric(
                x[len(x) // 2, None],
                block=recipe.lhs_block,
                criterion=recipe.criterion,
            )
        )
    metrics = jnp.stack(of_batches)
    first = float(_follow(threshold.start(recipe), metrics)[0][0])
    starts = {"first_batch": threshold.start(recipe)} | {
        str(factor): threshold.start(dataclasses.replace(recipe, start=factor * first))
        for factor in FACTORS
    }
    result = {}
    for name, state in starts.items():
        thetas, rates = (values.tolist() for values in _follow(state, metrics))
        result[name] = {"rate": rates, "theta": [theta / first for theta in thetas]}
    return result


@jax.jit
def _follow(state: threshold.State, metrics: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The thresholds and rates, [F], of forwards with these metrics, [F, ...]."""
    recipe = recipes.fallback

    def forward(
        state: threshold.State, metric: jax.Array
    ) -> tuple[threshold.State, tuple[jax.Array, jax.Array]]:
        theta = state["theta"]
        theta = jnp.where(theta < 0, threshold.quantile(metric, recipe), theta)
        state = threshold.update(state, metric, theta, recipe)
        return state, (theta, state["rate"])

    return lax.scan(forward, state, metrics)[1]
