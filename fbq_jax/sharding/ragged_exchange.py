"""An all-to-all whose slices have sizes that are known at run time only.

On GPUs and TPUs it is ``jax.lax.ragged_all_to_all``, which sends what the sizes say and
nothing else.  XLA has no such operation for CPUs.  There, devices gather everything and
keep what they would receive: the same results, for tests and small experiments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.sharding.assignment import MeshAxes


class Slices(NamedTuple):
    """The slices that one device of S sends and receives; all fields int32 ``[S * n]``.

    Each device sends n slices to each device, in the order of the mesh axes.

    Attributes:
      starts: where each slice begins in the array that is sent.
      sizes: the size of each slice that is sent.
      targets: where each slice begins in the array that its receiver gets.
      received: the size of each slice that is received, n from each device.
    """

    starts: jax.Array
    sizes: jax.Array
    targets: jax.Array
    received: jax.Array


def exchange_slices(
    x: jax.Array, size: int, slices: Slices, axes: MeshAxes
) -> jax.Array:
    """Sends slices of ``[N, ...]``; called inside ``shard_map`` over ``axes``.

    Args:
      x: the array, of which a device sends slices of the leading axis.
      size: the length of the result.
      slices: what is sent and received.
      axes: the mesh axes of the S devices.

    Returns:
      ``[size, ...]``, with zeros where no slice was received.
    """

    def send(x: jax.Array, *slices: jax.Array) -> jax.Array:
        output = jnp.zeros((size, *x.shape[1:]), x.dtype)
        return lax.ragged_all_to_all(x, output, *slices, axis_name=axes)

    def gather(x: jax.Array, *slices: jax.Array) -> jax.Array:
        return _gather_slices(x, size, Slices(*slices), axes)

    return lax.platform_dependent(x, *slices, cpu=gather, default=send)


def _gather_slices(
    x: jax.Array, size: int, slices: Slices, axes: MeshAxes
) -> jax.Array:
    """``exchange_slices`` by an all-gather."""
    every = lax.all_gather(x, axes)
    devices, index = len(every), lax.axis_index(axes)

    def for_this_device(x: jax.Array) -> jax.Array:
        x = lax.all_gather(x, axes).reshape(devices, devices, -1)
        return jnp.take(x, index, axis=1)

    starts, sizes, targets = map(for_this_device, slices[:3])
    starts += x.shape[0] * jnp.arange(devices, dtype=jnp.int32)[:, None]
    row = jnp.arange(size, dtype=jnp.int32)[:, None]
    offset = row - targets.reshape(1, -1)
    is_inside = (offset >= 0) & (offset < sizes.reshape(1, -1))
    source = jnp.sum(jnp.where(is_inside, starts.reshape(1, -1) + offset, 0), axis=1)
    source = jnp.where(jnp.any(is_inside, axis=1), source, devices * x.shape[0])
    rows = every.reshape(-1, *x.shape[1:])
    return rows.at[source].get(mode="fill", fill_value=0)
