"""Support for explicit mesh axes, which are part of array types."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def automatic(
    function: Callable[..., tuple[jax.Array, Any]], out: jax.core.ShapedArray
) -> Callable[..., tuple[jax.Array, Any]]:
    """Wraps a function so that explicit mesh axes are automatic inside it.

    Inside, arrays are stacks of matrices and blocks, whose sharding types cannot
    express.

    Args:
      function: returns an array and a tree of arrays.  It must take all arrays as
        arguments, not by closure.
      out: the shape of the returned array, and its sharding outside the function.

    Returns:
      The wrapped function.  The returned tree is replicated on every device.
    """
    mesh = out.sharding.mesh if out.sharding is not None else None
    if mesh is None or not mesh.explicit_axes:
        return function
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=(out.sharding, replicated)
    )
