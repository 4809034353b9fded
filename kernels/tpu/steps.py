"""The list of steps for the K loop of a GEMM with fallback.

Only some blocks have a residual.  A branch around the product of a residual would keep
the compiler from overlapping it with others.  So the loop over K is a loop over a list
of steps; each step names a K block to multiply, either of lhs or of its residual.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Steps(NamedTuple):
    """The steps of row blocks ``I`` in chunks ``C`` of ``J`` K blocks.

    Attributes:
      order: int32 ``[B, C, I, S]``: ``2 j`` for K block ``j`` of the first term, and
        ``2 j + 1`` right after it if its residual is used.  ``j`` increases.
      scales: float32 ``[B, C, I, S]``, the scale of each step.
      counts: int32 ``[B, C, I, 1]``, the number of steps.  The last ones may be there
        to fill up a multiple; they have scale 0.
    """

    order: jax.Array
    scales: jax.Array
    counts: jax.Array

    @staticmethod
    def length(most: int, multiple: int) -> int:
        """The length of lists with at most so many steps to fill up."""
        return -(-most // multiple) * multiple


def list_all(scales: jax.Array, *, multiple: int) -> Steps:
    """Lists one step for each K block.

    Args:
      scales: float32 ``[B, C, I, J]``, the scales of the blocks.
      multiple: the number of steps is a multiple of it.
    """
    missing = -scales.shape[3] % multiple
    order = jnp.pad(2 * jnp.arange(scales.shape[3], dtype=jnp.int32), (0, missing))
    scales = jnp.pad(scales, [(0, 0)] * 3 + [(0, missing)])
    counts = jnp.full((*scales.shape[:3], 1), scales.shape[3], jnp.int32)
    return Steps(jnp.broadcast_to(order, scales.shape), scales, counts)


def list_used(scales: jax.Array, residual_scales: jax.Array, *, multiple: int) -> Steps:
    """Lists a step for each K block of both terms that is used.

    Args:
      scales: float32 ``[B, C, I, J]``, the scales of the blocks of the first term.
      residual_scales: float32 ``[B, C, I, J]``, the scales of the residual, which is
        used where its scale is not 0; a NaN is not 0.
      multiple: the number of steps is a multiple of it.
    """
    used = jnp.stack([jnp.ones(scales.shape, bool), residual_scales != 0.0], -1)
    used = used.reshape(*scales.shape[:3], -1)
    both = jnp.stack([scales, residual_scales], -1).reshape(used.shape)
    unused = used.shape[3]
    places = jnp.where(used, jnp.arange(unused, dtype=jnp.int32), unused)
    order = jnp.sort(places)
    missing = [(0, 0)] * 3 + [(0, -unused % multiple)]
    order = jnp.pad(order, missing, constant_values=unused)
    found = jnp.take_along_axis(both, order, axis=3, mode="fill", fill_value=0.0)
    counts = jnp.sum(used, axis=3, keepdims=True, dtype=jnp.int32)
    counts += -counts % multiple
    return Steps(jnp.where(order == unused, 0, order), found, counts)
