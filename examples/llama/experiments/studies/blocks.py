"""The positions of the blocks that fall back."""

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies.block_metric import block_stats
from examples.llama.experiments.studies.subject import Subject
from fbq_jax import recipes


def study(subject: Subject) -> dict[str, list[list[str]]]:
    """Maps the blocks of X at the threshold of the first batch.

    Returns:
        By projection and layer: for each block of tokens a string with one digit for
        each block of channels, "1" where the block falls back.
    """
    return {name: [_map(x) for x in of.x] for name, of in subject.operands.items()}


def _map(x: jax.Array) -> list[str]:
    return ["".join(map(str, row)) for row in _falls_back(x).tolist()]


@jax.jit
def _falls_back(x: jax.Array) -> jax.Array:
    """1 where a block falls back, int32 [blocks of tokens, blocks of channels]."""
    stats = block_stats(x, recipes.fallback)
    return (stats.metric[0] > stats.theta).astype(jnp.int32)
