"""Where the blocks lie that fall back."""

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.subject import Subject
from fbq_jax import ops, recipes
from fbq_jax.core import threshold


def study(subject: Subject) -> dict[str, list[list[str]]]:
    """Maps of X's blocks, at the threshold of the first batch.

    Returns:
        By projection and layer: for each block of tokens a string of one digit a block
        of channels, "1" where it falls back.
    """
    return {name: [_map(x) for x in of.x] for name, of in subject.operands.items()}


def _map(x: jax.Array) -> list[str]:
    return ["".join(map(str, row)) for row in _fall_back(x).tolist()]


@jax.jit
def _fall_back(x: jax.Array) -> jax.Array:
    """1 where a block does, int32 [blocks of tokens, blocks of channels]."""
    recipe = recipes.fallback
    assert recipe.criterion is not None
    (metric,) = ops.block_metric(
        x[None], block=recipe.lhs_block, criterion=recipe.criterion
    )
    return (metric > threshold.quantile(metric, recipe)).astype(jnp.int32)
