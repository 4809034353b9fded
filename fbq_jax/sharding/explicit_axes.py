"""Support for explicit mesh axes, which are part of array types."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

_Tree = TypeVar("_Tree")


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


def apply_by_rows(function: Callable[..., _Tree], x: jax.Array, *args: Any) -> _Tree:
    """Applies a function of x's rows, inside which explicit mesh axes are automatic.

    Args:
      function: maps ``x`` and ``args`` to a tree of arrays with x's leading axes.  It
        must take all arrays as arguments, not by closure.
      x: an array ``[..., C]``.
      *args: trees of arrays.

    Returns:
      The tree.  Its arrays are sharded as x is, except for a last axis that the devices
      of x's last axis do not divide.
    """
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return function(x, *args)
    *lead, last = sharding.spec
    axes = last if isinstance(last, tuple) else () if last is None else (last,)
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)

    def sharding_of(array: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = PartitionSpec(*lead, None if array.shape[-1] % devices else last)
        return NamedSharding(sharding.mesh, spec)

    # Without their shardings, which some operations of the function do not take.
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (x, *args)
    )
    out_sharding = jax.tree.map(sharding_of, jax.eval_shape(function, *shapes))
    return jax.sharding.auto_axes(
        function, axes=sharding.mesh.explicit_axes, out_sharding=out_sharding
    )(x, *args)


def reshard_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Shards x over explicit mesh axes as an array with its last axes is."""
    sharding = jax.typeof(like).sharding
    if not sharding.mesh.explicit_axes:
        return x
    spec = PartitionSpec(*tuple(sharding.spec)[like.ndim - x.ndim :])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
