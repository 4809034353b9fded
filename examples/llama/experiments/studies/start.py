"""How the threshold finds its range: from the first batch, or from a wrong start."""

import dataclasses

import jax
import jax.numpy as jnp

from examples.llama.experiments.probe import operands
from examples.llama.experiments.studies.subject import Subject
from fbq_jax import ops, recipes, threshold

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
    metrics = []
    for i in range(FORWARDS):
        tokens = jnp.asarray(subject.text[i])
        x = operands(subject.config, subject.params, tokens)["down"].x
        metrics.append(
            ops.block_metric(
                x[len(x) // 2, None],
                block=recipe.lhs_block,
                criterion=recipe.criterion,
            )
        )
    first = threshold.quantile(metrics[0], recipe)
    starts = {str(factor): factor * float(first) for factor in FACTORS}
    found = {"first_batch": threshold.start(recipe)} | {
        name: threshold.start(dataclasses.replace(recipe, start=theta))
        for name, theta in starts.items()
    }
    result = {}
    for name, state in found.items():
        rates, thetas = [], []
        for metric in metrics:
            theta = state["theta"]
            theta = jnp.where(theta < 0, threshold.quantile(metric, recipe), theta)
            state = _update(state, metric, theta)
            rates.append(float(state["rate"]))
            thetas.append(float(theta / first))
        result[name] = {"rate": rates, "theta": thetas}
    return result


@jax.jit
def _update(
    state: threshold.State, metric: jax.Array, theta: jax.Array
) -> threshold.State:
    return threshold.update(state, metric, theta, recipes.fallback)
