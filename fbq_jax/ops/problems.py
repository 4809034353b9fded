"""Problems that differ in their groups of rows.

Where devices have groups of their own (``fbq_jax.experts.exchange``), there are D
parts of the groups, which own different matrices, and in each C copies, which have
different tiles of the same groups.  Arrays of tiles have leading axes ``[D, C]``, and
matrices ``[D]``.  A device computes one problem, or a few one after the other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def lead_of(tiles: jax.Array) -> str:
    """The words of the leading axes of tiles, given an array with a value per tile."""
    return "d c " if tiles.ndim == 3 else ""


def map_problems(
    function: Callable[..., Any], tiles: tuple[Any, ...], shared: Any = None
) -> Any:
    """Calls a function on each problem.

    Args:
      function: takes the tiles and the matrices of one problem.
      tiles: trees of arrays; the last one has a value per tile.
      shared: a tree of arrays with one leading axis, the matrices of each part.
    """
    if tiles[-1].ndim == 1:
        return function(*tiles, shared)
    parts, copies = tiles[-1].shape[:2]

    def call(index: jax.Array | int, *tiles: Any) -> Any:
        return function(*tiles, jax.tree.map(lambda x: x[index], shared))

    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tiles)
    if parts == copies == 1:
        out = call(0, *jax.tree.map(lambda x: x[0], merged))
        return jax.tree.map(lambda x: x[None, None], out)
    index = jnp.arange(parts * copies, dtype=jnp.int32) // copies
    out = lax.map(lambda args: call(*args), (index, *merged))
    return jax.tree.map(lambda x: x.reshape(parts, copies, *x.shape[1:]), out)
