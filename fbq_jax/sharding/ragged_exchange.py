"""An all-to-all whose slices have sizes that are known at run time only.

``jax.lax.ragged_all_to_all`` sends what the sizes say and nothing else.  TPUs run it,
and so do more GPUs than one machine has.  Within a machine XLA runs it as a kernel that
copies at a few percent of NVLink's speed (XLA issue 33386); there, an ordinary
all-to-all of messages as long as the longest possible one takes a fraction of the time,
although it sends more.  CPUs, for which XLA has no ragged one, do the same.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.sharding.assignment import MeshAxes

# The most GPUs of a machine.
_MACHINE = 8


class Slices(NamedTuple):
    """The slices that one device of S sends and receives; all fields int32 ``[S * n]``.

    Each device sends n slices to each device, in the order of the mesh axes.

    Attributes:
      starts: where each slice begins in the array that is sent.
      sizes: the size of each slice that is sent.
      targets: where each slice begins in the array that its receiver gets.
      received: the size of each slice that is received, n from each device.
      places: where each slice that is received begins in the result.
    """

    starts: jax.Array
    sizes: jax.Array
    targets: jax.Array
    received: jax.Array
    places: jax.Array


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

    def ragged(x: jax.Array, *slices: jax.Array) -> jax.Array:
        output = jnp.zeros((size, *x.shape[1:]), x.dtype)
        *known, _places = slices
        return lax.ragged_all_to_all(x, output, *known, axis_name=axes)

    def padded(x: jax.Array, *slices: jax.Array) -> jax.Array:
        return _exchange_padded(x, size, Slices(*slices), axes)

    on_gpus = padded if lax.axis_size(axes) <= _MACHINE else ragged
    return lax.platform_dependent(x, *slices, cuda=on_gpus, tpu=ragged, default=padded)


def _exchange_padded(
    x: jax.Array, size: int, slices: Slices, axes: MeshAxes
) -> jax.Array:
    """``exchange_slices`` by an all-to-all of messages of the same length."""
    devices = lax.axis_size(axes)
    longest = min(x.shape[0], size)
    slices = Slices(*(field.reshape(devices, -1) for field in slices))
    # Where slices begin in messages.
    sent, received = (exclusive_sum(x, axis=1) for x in (slices.sizes, slices.received))
    index = jax.vmap(_sources, in_axes=(0, 0, 0, None, None))
    packed = index(sent, slices.sizes, slices.starts, longest, 0)
    messages = x.at[packed.reshape(-1)].get(mode="promise_in_bounds")
    messages = lax.all_to_all(messages, axes, 0, 0, tiled=True)
    received += longest * jnp.arange(devices, dtype=jnp.int32)[:, None]
    source = _sources(
        slices.places.reshape(-1),
        slices.received.reshape(-1),
        received.reshape(-1),
        size,
        devices * longest,
    )
    return messages.at[source].get(mode="fill", fill_value=0)


def _sources(
    places: jax.Array, sizes: jax.Array, starts: jax.Array, size: int, missing: int
) -> jax.Array:
    """Where the value of each of ``size`` places comes from, int32 ``[size]``.

    Args:
      places: int32 ``[n]``, where slices begin.
      sizes: int32 ``[n]``, their sizes.
      starts: int32 ``[n]``, where they come from.
      size: the number of places.
      missing: the result where there is no slice.
    """
    offset = jnp.arange(size, dtype=jnp.int32)[:, None] - places[None]
    is_inside = (offset >= 0) & (offset < sizes[None])
    source = jnp.sum(jnp.where(is_inside, starts[None] + offset, 0), axis=1)
    return jnp.where(jnp.any(is_inside, axis=1), source, missing)


def exclusive_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """The sums of the values before each one, such as where slices of sizes begin."""
    return jnp.cumsum(x, axis=axis, dtype=jnp.int32) - x
