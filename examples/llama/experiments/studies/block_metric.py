"""The metric that decides which blocks fall back, as the library measures it."""

import jax
import jax.numpy as jnp

from fbq_jax import Recipe, Stats, dot_general

MATMUL = (((1,), (0,)), ((), ()))


def block_stats(x: jax.Array, recipe: Recipe) -> Stats:
    """Returns the metric of the blocks of ``x`` and the threshold of a first batch.

    Args:
        x: A matrix [M, K].
        recipe: Provides the block size, the criterion and the target rate.
    """
    # The statistics do not depend on the other operand.
    zeros = jnp.zeros((x.shape[1], 128), x.dtype)
    _, stats = dot_general(x, zeros, MATMUL, recipe=recipe)
    return stats
