"""The K loop of a fallback GEMM as a list of steps, one list a row of blocks.

A row of blocks of lhs is multiplied block by block along K; where a block fell back, by
its residual too.  Both are steps of one kind, a block of codes with a scale, so that
the kernel's loop has no branch and costs exactly 1 + the rate of fallback.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Steps(NamedTuple):
    """What the K loop of each row of blocks does.

    Attributes:
      source: int32 ``[B, I, 2 J + unused]``: ``2 * j`` for block j of lhs along K,
        ``2 * j + 1`` for its residual.
      scale: float32, likewise: the scale of that block.
      count: int32 ``[B, I]``, the number of steps; entries beyond it are zeros.
    """

    source: jax.Array
    scale: jax.Array
    count: jax.Array


def steps(scales: jax.Array, residual_scales: jax.Array, *, unused: int) -> Steps:
    """Lists each block, and after it its residual where that has a scale.

    Args:
      scales: float32 ``[B, I, J]``, of lhs.
      residual_scales: likewise, of the residual; 0 where a block did not fall back.
      unused: entries to add at the end of each list.
    """
    blocks = scales.shape[2]
    fallback = (residual_scales != 0.0).astype(jnp.int32)
    end = jnp.cumsum(1 + fallback, axis=2)
    step = jnp.arange(2 * blocks + unused, dtype=jnp.int32)
    # A step belongs to the first block that ends after it.
    block = jnp.sum(end[:, :, None, :] <= step[:, None], axis=3, dtype=jnp.int32)
    listed = block < blocks
    block = jnp.where(listed, block, 0)
    residual = step == jnp.take_along_axis(end, block, axis=2) - 1
    residual &= jnp.take_along_axis(fallback, block, axis=2) == 1
    scale = jnp.where(
        residual,
        jnp.take_along_axis(residual_scales, block, axis=2),
        jnp.take_along_axis(scales, block, axis=2),
    )
    return Steps(
        jnp.where(listed, 2 * block + residual.astype(jnp.int32), 0),
        jnp.where(listed, scale, 0.0),
        end[:, :, -1],
    )
