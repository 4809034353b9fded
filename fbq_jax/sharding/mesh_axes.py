"""The axes of a mesh as a layer sees them: explicit ones, and manual ones.

Explicit axes are part of array types.  Inside ``jax.shard_map`` and ``jax.pmap`` axes
are manual: code runs once on each device and sees that device's shard only.  A layer
whose seed is replicated would draw the same noise on every device, and the errors of
its gradients would not average out.  Nothing here changes anything on a single device.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.kernels import rounding
from fbq_jax.sharding.layer_names import warn_first

Tree = TypeVar("Tree")


def run_over_auto_axes(
    function: Callable[..., tuple[jax.Array, Any]],
    out: jax.core.ShapedArray,
    *args: Any,
) -> tuple[jax.Array, Any]:
    """Calls a function inside which explicit mesh axes are automatic.

    Inside, arrays are stacks of matrices and blocks, whose sharding types cannot
    express.

    Args:
      function: returns an array and a tree of arrays.  It must take all arrays as
        arguments, not by closure.
      out: the shape of the returned array, and its sharding outside the function.
      *args: the arguments.

    Returns:
      The array, and the tree, which is replicated on every device.
    """
    mesh = out.sharding.mesh if out.sharding is not None else None
    if mesh is None or not mesh.explicit_axes:
        return function(*args)
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = out.sharding, replicated
    run = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=shardings
    )
    results: tuple[jax.Array, Any] = run(*args)
    return results


def device_seed(seed: jax.Array, *operands: jax.Array) -> jax.Array:
    """The seed of a call on this device.

    Devices with different operands get different seeds.  Devices that JAX knows to hold
    the same operands get the same seed, so that replicated results stay replicated.
    With ``check_vma=False``, and in ``pmap``, JAX does not know: then all devices get
    different seeds.  Outside manual mesh axes, and on a single device, the seed does
    not change.

    Args:
      seed: uint32 ``[]``.
      *operands: the operands of the call, of which each device has a shard or a copy.
    """
    varying = varying_axes(*operands)
    for axis in _manual_axes():
        index = lax.axis_index(axis)
        if axis in varying or axis not in varying_axes(index):
            seed = rounding.fold(seed, index)
    return seed


def warn_of_copies() -> None:
    """Warns, once, if devices may hold copies of a layer that draw different noise.

    The backward pass of a layer is traced where this is called.  A single manual axis
    gives no warning, because a layer is hardly ever replicated over all devices.
    """
    unknown = [
        axis for axis in _manual_axes() if not varying_axes(lax.axis_index(axis))
    ]
    if len(unknown) > 1:
        names = ", ".join(map(str, unknown))
        warn_first(
            ("copies", *unknown),
            f"each device of the manual mesh axes {names} draws its own noise, because "
            "shard_map(check_vma=False) does not tell which operands are copies. "
            "Average the gradients of a layer over the axes that have copies of it, or "
            "its copies drift apart. Without GPU kernels, check_vma=True gives copies "
            "the same noise",
        )


def as_varying(tree: Tree) -> Tree:
    """Arrays that vary over the same manual mesh axes.

    JAX inserts the same casts in ``lax.dot_general``.  The gradient of an array that is
    cast is summed over the devices.
    """
    axes = varying_axes(*jax.tree.leaves(tree))

    def cast(x: jax.Array) -> jax.Array:
        missing = _in_order(axes - varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def max_over_copies(x: jax.Array, state: jax.Array) -> jax.Array:
    """The maximum of x over the devices that JAX knows to hold copies of the state.

    With it, the state stays the same on these devices.
    """
    axes = _in_order(varying_axes(x) - varying_axes(state))
    return lax.pmax(x, axes) if axes else x


def varying_axes(*arrays: jax.Array) -> frozenset[Any]:
    """The manual mesh axes over which JAX knows the arrays to vary."""
    types = (jax.typeof(x) for x in arrays)
    # Only jax 0.9 has ``vma``. This goes when the lowest supported version is 0.10.
    return frozenset().union(
        *(t.vma if hasattr(t, "vma") else t.manual_axis_type.varying for t in types)
    )


def _in_order(axes: frozenset[Any]) -> tuple[Any, ...]:
    """Axes in the order of the mesh, so that all processes compile the same program."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(name for name in names if name in axes)


def _manual_axes() -> list[Any]:
    """The manual mesh axes that have several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axis for axis in mesh.axis_names if axis in mesh.manual_axes)
    return [axis for axis in names if mesh.shape[axis] > 1]
