"""Support for explicit mesh axes, which are part of the types of arrays."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def automatic(
    function: Callable[..., tuple[jax.Array, Any]], out: jax.ShapeDtypeStruct
) -> Callable[..., tuple[jax.Array, Any]]:
    """Wraps a function so that explicit mesh axes are automatic inside it.

    No type can express the sharding of stacked matrices or of blocks.

    Args:
      function: returns an array and a tree of arrays.  It takes every array as an
        argument, none by closure.
      out: the shape of the returned array, and its sharding outside the function.

    Returns:
      The wrapped function.  Every device gets the whole of the returned tree.
    """
    mesh = out.sharding.mesh if out.sharding is not None else None
    if mesh is None or not mesh.explicit_axes:
        return function
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=(out.sharding, replicated)
    )
