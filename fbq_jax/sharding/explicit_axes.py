"""Operations on arrays that explicit mesh axes shard."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

_Tree = TypeVar("_Tree")


def apply_by_rows(
    function: Callable[..., _Tree],
    x: jax.Array,
    *args: Any,
    specs_of: Callable[..., Any] = PartitionSpec,
) -> _Tree:
    """Applies a function of x, inside which explicit mesh axes are automatic.

    Args:
      function: maps ``x`` and ``args`` to a tree of arrays.  It must take all arrays as
        arguments, not by closure.
      x: an array.
      *args: trees of arrays.
      specs_of: maps the mesh axes of each axis of x to a ``PartitionSpec`` of the
        results, or to a tree of them that is a prefix of the results'; by default they
        are sharded as x is.

    Returns:
      The results.  An axis that the devices do not divide is not sharded.
    """
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return function(x, *args)

    def devices(axes: Any) -> int:
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        return math.prod(sharding.mesh.shape[name] for name in names)

    def sharding_of(spec: PartitionSpec, array: jax.ShapeDtypeStruct) -> NamedSharding:
        pairs = zip(spec, array.shape, strict=True)
        fitting = [None if size % devices(axes) else axes for axes, size in pairs]
        return NamedSharding(sharding.mesh, PartitionSpec(*fitting))

    # Without their shardings, which some operations of the function do not take.
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (x, *args)
    )
    results = jax.eval_shape(function, *shapes)
    specs = jax.tree.broadcast(specs_of(*sharding.spec), results)
    return jax.sharding.auto_axes(
        function,
        axes=sharding.mesh.explicit_axes,
        out_sharding=jax.tree.map(sharding_of, specs, results),
    )(x, *args)


def reshard_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Shards x over explicit mesh axes as an array with its last axes is."""
    sharding = jax.typeof(like).sharding
    if not sharding.mesh.explicit_axes:
        return x
    spec = PartitionSpec(*tuple(sharding.spec)[like.ndim - x.ndim :])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
