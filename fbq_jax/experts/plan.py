"""Which rows each expert computes, and where these rows are.

Tokens are sorted by expert.  If devices have different experts, the tokens of S devices
go to D devices, each with C copies.  Each expert's rows are in the order of all tokens,
so its blocks hold the same rows on any number of devices.  Each device finds the block
and the place of its rows from the numbers of rows that devices have for each expert.
The copies of an expert's device share its rows in whole tiles of 128: no block is split
between them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from fbq_jax.experts.expert_sharding import ExpertSharding
from fbq_jax.experts.routing import Routing, count_tokens
from fbq_jax.kernels.tiles import tile_count
from fbq_jax.sharding.ragged_exchange import exclusive_sum

#: The rows of each expert start at multiples of this on the expert's device.  It is a
#: multiple of the rows of every block.
TILE = 128


class Dispatch(NamedTuple):
    """The order of the rows that the experts compute; all fields are int32.

    Row ``j`` is token ``order[j] // k``, for its expert number ``order[j] % k``.

    Attributes:
      order: ``[T k]``.
      positions: ``[T, k]``, the row of each token for each of its experts; the inverse
        of ``order``.
      group_sizes: ``[E]``, the number of rows of each expert; dropped rows come last
        and are in no group.
      dropped: ``[]``, the number of dropped rows.
    """

    order: jax.Array
    positions: jax.Array
    group_sizes: jax.Array
    dropped: jax.Array


def dispatch(
    experts: jax.Array, num_experts: int, capacity: jax.Array | int | None = None
) -> Dispatch:
    """Sorts tokens by expert; the tokens of one expert keep their order.

    Args:
      experts: int32 ``[T, k]``, the experts of each token.
      num_experts: E.
      capacity: the most rows of an expert, which drops its last ones, or int32 ``[E]``
        of each expert; None for all.

    >>> dispatch(jnp.array([[1, 0], [1, 2]]), num_experts=3, capacity=1)
    ... # doctest: +NORMALIZE_WHITESPACE
    Dispatch(order=Array([1, 0, 3, 2], dtype=int32),
             positions=Array([[1, 0], [3, 2]], dtype=int32),
             group_sizes=Array([1, 1, 1], dtype=int32),
             dropped=Array(1, dtype=int32))
    """
    flat = experts.reshape(-1)
    order, positions = _sort(flat)
    sizes = count_tokens(flat, num_experts)
    if capacity is not None:
        most = jnp.broadcast_to(capacity, sizes.shape)
        starts = exclusive_sum(sizes)
        flat = jnp.where(positions - starts[flat] < most[flat], flat, num_experts)
        order, positions = _sort(flat)
        sizes = jnp.minimum(sizes, most)
    dropped = flat.size - jnp.sum(sizes, dtype=jnp.int32)
    return Dispatch(order, positions.reshape(experts.shape), sizes, dropped)


def _sort(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stable order of keys, and the position of each key in it."""
    index = jnp.arange(keys.size, dtype=jnp.int32)
    _, order = lax.sort_key_val(keys, index)
    return order, jnp.zeros_like(order).at[order].set(index, unique_indices=True)


class GroupTiles(NamedTuple):
    """Tiles of up to ``m`` rows; all fields are int32.

    They are ``[T]`` on one device.  On D devices with different experts and C copies of
    each, they are ``[D, C, T]``.

    Attributes:
      groups: the tile's expert among its device's experts, in ascending order; the
        number of these experts for a tile after the last one.
      first_rows: the first row of the tile; arbitrary without rows.
      row_counts: the number of rows of the tile.
      indices: the index of the tile on one device; arbitrary without rows.
    """

    groups: jax.Array
    first_rows: jax.Array
    row_counts: jax.Array
    indices: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "positions", "counts"],
    meta_fields=["rows", "sharding", "mesh", "capacity", "sends"],
)
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Which rows devices exchange, for S devices with ``T / S`` tokens each.

    ``ragged_dot`` takes it in place of the sizes of the groups.

    Attributes:
      order: int32 ``[T k]``, sharded over the devices: ``Dispatch.order`` of each
        device's own tokens.
      positions: int32 ``[T, k]``, sharded over the devices: ``Dispatch.positions`` of
        each device's own tokens.
      counts: int32 ``[S, E]``, how many rows each device has for each expert.
      rows: ``T k``.
      sharding: the mesh axes.
      mesh: the mesh.
      capacity: the most rows of an expert; None for no limit.
      sends: True if lhs is tokens ``[T, K]``, whose rows are sent, and the output
        ``[D, C, R, N]`` is on the devices of the experts; False if lhs is there, and
        the output returns to the tokens as ``[T, k, N]``.
    """

    order: jax.Array
    positions: jax.Array
    counts: jax.Array
    rows: int
    sharding: ExpertSharding
    mesh: AbstractMesh
    capacity: int | None
    sends: bool = True

    def __len__(self) -> int:
        """E, the number of experts."""
        return self.counts.shape[1]

    @property
    def back(self) -> "Exchange":
        """The same exchange for lhs on the devices of the experts."""
        return dataclasses.replace(self, sends=False)

    @property
    def parts(self) -> int:
        """D, the number of devices with different experts."""
        return math.prod(self.mesh.shape[axis] for axis in self.sharding.experts)

    @property
    def local_experts(self) -> int:
        """``E / D``, the number of experts on each device."""
        return len(self) // self.parts

    @property
    def copies(self) -> int:
        """C, the number of copies of each expert."""
        return math.prod(self.mesh.shape[axis] for axis in self.sharding.copies)

    @property
    def has_other_axes(self) -> bool:
        """Whether the mesh has axes of several devices that shard no tokens."""
        return self.mesh.size > self.parts * self.copies

    @property
    def slots(self) -> int:
        """The number of rows that a device has room for, a multiple of 128.

        It is enough for any sizes of groups: without a capacity, all tokens may go to
        the experts of one device.
        """
        local, rows = self.local_experts, self.rows
        if self.capacity is not None:
            rows = min(rows, local * self.capacity)
        return TILE * -(-tile_count(local, rows, TILE) // self.copies)

    def tile_count(self, m: int) -> int:
        """The number of tiles of m rows on one device, at most."""
        return tile_count(len(self), self.rows, m)

    @property
    def group_sizes(self) -> jax.Array:
        """The number of rows of each expert, int32 ``[E]``."""
        return jnp.sum(self.counts, axis=0, dtype=jnp.int32)

    def first_tiles(self, m: int) -> jax.Array:
        """The index on one device of each expert's first tile of m rows, ``[E]``."""
        return exclusive_sum(-(-self.group_sizes // m))

    def tiles(self, m: int) -> GroupTiles:
        """The tiles of m rows, a divisor of 128, in the order of their places."""
        local = self.local_experts
        counts = (-(-self.group_sizes // TILE)).reshape(self.parts, local)
        ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
        # Each copy has a share of the whole tiles of 128 rows; a slot is a tile of m.
        share = -(-ends[:, -1] // self.copies)[:, None, None]
        copy = jnp.arange(self.copies, dtype=jnp.int32)[None, :, None]
        first_row = jnp.arange(0, self.slots, m, dtype=jnp.int32)
        slot = (first_row // TILE)[None, None, :]
        place = copy * share + slot
        group = jnp.sum(
            place[..., None] >= ends[:, None, None], axis=3, dtype=jnp.int32
        )
        group = jnp.where(slot < share, group, local)
        part = jnp.arange(self.parts, dtype=jnp.int32)[:, None, None]
        expert = part * local + jnp.minimum(group, local - 1)
        tile = place - (ends - counts).reshape(-1)[expert]
        first = tile * TILE + (first_row % TILE)[None, None, :]
        rows = jnp.clip(self.group_sizes[expert] - first, 0, m)
        rows = jnp.where(group < local, rows, 0)
        index = self.first_tiles(m)[expert] + first // m
        index = jnp.clip(index, 0, self.tile_count(m) - 1)
        first_row = jnp.broadcast_to(first_row, rows.shape)
        return GroupTiles(group, first_row, rows, index)

    def over_devices(
        self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any
    ) -> Callable[..., Any]:
        """``shard_map`` over the axes of tokens; other axes stay automatic.

        Args:
          function: called with this plan, whose ``order`` and ``positions`` are of the
            device's own tokens there, and the arguments.
          in_specs: the specifications of the arguments.
          out_specs: the specifications of the results.
        """
        own = dataclasses.replace(
            self,
            order=self.by_token,  # type: ignore[arg-type]
            positions=self.by_token,  # type: ignore[arg-type]
            counts=P(),  # type: ignore[arg-type]
        )
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(own, *in_specs),
            out_specs=out_specs,
            axis_names={*self.sharding.axes},
            check_vma=False,
        )
        # Outside of jit, shard_map would run one primitive after the other.
        return functools.partial(jax.jit(mapped), self)

    @property
    def device(self) -> jax.Array:
        """Inside ``over_devices``: the index of this device among S."""
        return lax.axis_index(self.sharding.axes)

    @property
    def part(self) -> jax.Array:
        """Inside ``over_devices``: the index of this device's experts among D."""
        return self.device % self.parts

    @property
    def copy(self) -> jax.Array:
        """Inside ``over_devices``: the index of this copy of the experts among C."""
        return self.device // self.parts

    @property
    def by_token(self) -> P:
        """The specification of arrays of tokens."""
        return P(self.sharding.axes)

    @property
    def by_expert(self) -> P:
        """The specification of arrays ``[D, C, ...]``."""
        return P(self.sharding.experts, self.sharding.copies or None)


def plan_dispatch(
    routing: Routing, experts: jax.Array, sharding: ExpertSharding | None
) -> tuple[Dispatch | Exchange, jax.Array]:
    """How tokens get to their experts, and the number of dropped rows, int32 ``[]``.

    Args:
      routing: the settings.
      experts: int32 ``[T, k]``, the experts of each token.
      sharding: the mesh axes of experts; None if each device has all.

    Raises:
      ValueError: the mesh, the experts or the tokens do not fit the sharding.
    """
    number, capacity = routing.num_experts, routing.capacity(experts.shape[0])
    if sharding is None:
        plan = dispatch(experts, number, capacity)
        return plan, plan.dropped
    exchange = exchange_plan(sharding, experts, number, capacity)
    kept = jnp.sum(exchange.group_sizes, dtype=jnp.int32)
    return exchange, experts.size - kept


def exchange_plan(
    sharding: ExpertSharding, experts: jax.Array, num_experts: int, capacity: int | None
) -> Exchange:
    """Plans the exchange of tokens.

    Args:
      sharding: the mesh axes.
      experts: int32 ``[T, k]``, the experts of each token.
      num_experts: E.
      capacity: the most rows of an expert, which drops its last ones; None for all.

    Raises:
      ValueError: the mesh does not fit, or E or T is no positive multiple of its
        devices.
    """
    mesh = sharding.mesh()
    parts = math.prod(mesh.shape[axis] for axis in sharding.experts)
    devices = math.prod(mesh.shape[axis] for axis in sharding.axes)
    if num_experts % parts or not len(experts) or len(experts) % devices:
        raise ValueError(
            f"experts over the mesh axes {sharding.experts} of {parts} devices, with "
            f"tokens over {sharding.axes} of {devices}, take positive multiples of "
            f"these numbers; got {num_experts} experts and {len(experts)} tokens"
        )
    empty = jnp.zeros(0, jnp.int32)
    plan = Exchange(empty, empty, empty, experts.size, sharding, mesh, capacity)

    def local(plan: Exchange, experts: jax.Array) -> tuple[jax.Array, ...]:
        sizes = dispatch(experts, num_experts).group_sizes
        counts = lax.all_gather(sizes, sharding.axes)
        if capacity is not None:
            counts = jnp.clip(capacity - exclusive_sum(counts), 0, counts)
        kept = None if capacity is None else counts[plan.device]
        order, positions, *_ = dispatch(experts, num_experts, kept)
        return order, positions, counts

    run = plan.over_devices(
        local, (plan.by_token,), (plan.by_token, plan.by_token, P())
    )
    order, positions, counts = lax.optimization_barrier(run(experts))
    return dataclasses.replace(plan, order=order, positions=positions, counts=counts)
