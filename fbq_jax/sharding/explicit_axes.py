"""Axes of a mesh that are explicit, part of the arrays' types."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def automatic(
    function: Callable[..., tuple[jax.Array, Any]], out: jax.ShapeDtypeStruct
) -> Callable[..., tuple[jax.Array, Any]]:
    """A function in which explicit axes are automatic.

    Stacks of matrices and blocks have no shardings that a type could name.

    Args:
      function: of arrays that it is given, none of them by closure.  Returns an array,
        and a tree of arrays that every device gets whole.
      out: the shape of that array, and the sharding that it has outside.
    """
    mesh = out.sharding.mesh if out.sharding is not None else None
    if mesh is None or not mesh.explicit_axes:
        return function
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=(out.sharding, everywhere)
    )
