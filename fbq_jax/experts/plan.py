"""Where the rows of experts are on several devices.

The tokens of S devices go to D devices with different experts, each with C copies.
Each expert's rows are in the order of all tokens, so its blocks hold the same rows on
any number of devices, and each device finds the block and the place of its rows from
the numbers of rows that devices have for each expert.  The copies of an expert's device
share its rows in whole tiles of 128: no block is split between them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fbq_jax.kernels.tiles import tile_count
from fbq_jax.sharding.assignment import MeshAxes
from fbq_jax.sharding.ragged_exchange import exclusive_sum

#: The rows of each expert start at multiples of this on the expert's device.  It is a
#: multiple of the rows of every block.
TILE = 128


@dataclasses.dataclass(frozen=True)
class ExpertSharding:
    """The mesh axes of a mixture of experts (expert parallelism).

    Experts are sharded over ``experts``.  Tokens are sharded over ``copies`` and
    ``experts``, in this order.  ``jax.set_mesh`` sets the mesh.

    Attributes:
      experts: the mesh axis, or axes, with different experts.
      copies: the axes with different tokens but copies of the experts, as in data
        parallelism.

    Raises:
      TypeError: axes are not names.
      ValueError: there is no axis of experts, or an axis occurs twice.

    >>> ExpertSharding("expert", copies="data")
    ExpertSharding(experts=('expert',), copies=('data',))
    """

    experts: str | MeshAxes
    copies: str | MeshAxes = ()

    def __post_init__(self) -> None:
        for name in ("experts", "copies"):
            axes = getattr(self, name)
            axes = (axes,) if isinstance(axes, str) else axes
            if not (
                isinstance(axes, tuple | list)
                and all(isinstance(axis, str) for axis in axes)
            ):
                raise TypeError(
                    f"ExpertSharding takes the names of mesh axes as {name}; got "
                    f"{axes!r}"
                )
            object.__setattr__(self, name, tuple(axes))
        if not self.experts or len({*self.axes}) < len(self.axes):
            raise ValueError(
                "ExpertSharding takes at least one axis of experts, and each axis "
                f"once; got {self}"
            )

    @property
    def axes(self) -> MeshAxes:
        """The axes that tokens are sharded over."""
        return (*self.copies, *self.experts)

    def mesh(self) -> AbstractMesh:
        """The mesh of ``jax.set_mesh``.

        Raises:
          ValueError: it lacks an axis, or an axis is explicit or manual.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not _has_automatic(mesh, self.axes):
            raise ValueError(
                f"experts are sharded over the mesh axes {self.axes}, which takes a "
                "mesh with these axes, of type AxisType.Auto, set by jax.set_mesh; got "
                f"{mesh}"
            )
        return mesh

    def sharded(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """An initializer of kernels ``[E, K, N]`` that shards them over ``experts``.

        A kernel that ``init`` boxes has its own sharding.  Without a mesh of
        ``jax.set_mesh`` kernels stay as they are.
        """

        @functools.wraps(init)
        def init_sharded(*args: Any) -> Any:
            kernel, mesh = init(*args), jax.sharding.get_abstract_mesh()
            has_axes = _has_automatic(mesh, tuple(self.experts))
            if not has_axes or not isinstance(kernel, jax.Array):
                return kernel
            spec = P(self.experts, P.UNCONSTRAINED, P.UNCONSTRAINED)
            return lax.with_sharding_constraint(kernel, spec)

        return init_sharded


def check_expert_sharding(sharding: object) -> None:
    """Raises TypeError unless ``sharding`` is an ``ExpertSharding`` or None."""
    if not isinstance(sharding, ExpertSharding | None):
        raise TypeError(
            "a mixture of experts takes an ExpertSharding, such as "
            "ExpertSharding('expert', copies='data'), or None as expert_sharding; got "
            f"{sharding!r}"
        )


def _has_automatic(mesh: AbstractMesh, axes: MeshAxes) -> bool:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(types.get(axis) == AxisType.Auto for axis in axes)


class ExpertTiles(NamedTuple):
    """The tiles of ``m`` rows on each device; all fields have the shape ``[D, C, T]``.

    D devices have different experts, each with C copies.

    Attributes:
      groups: int32, the tile's expert among its device's experts, in ascending order;
        the number of these experts for a tile after the last one.
      row_counts: int32, the number of rows of the tile.
      indices: int32, the index of the tile on one device; arbitrary without rows.
    """

    groups: jax.Array
    row_counts: jax.Array
    indices: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "positions", "counts"],
    meta_fields=["sharding", "mesh", "capacity"],
)
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Which rows devices exchange, for S devices with ``T / S`` tokens each.

    ``order`` and ``positions`` are as in ``fbq_jax.experts.mlp.Dispatch``, on each
    device for its own tokens.

    Attributes:
      order: int32 ``[T k]``, sharded over the devices.
      positions: int32 ``[T, k]``, sharded over the devices.
      counts: int32 ``[S, E]``, how many rows each device has for each expert.
      sharding: the mesh axes.
      mesh: the mesh.
      capacity: the most rows of an expert; None for no limit.
    """

    order: jax.Array
    positions: jax.Array
    counts: jax.Array
    sharding: ExpertSharding
    mesh: AbstractMesh
    capacity: int | None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts.shape[1]

    @property
    def parts(self) -> int:
        """D, the number of devices with different experts."""
        return math.prod(self.mesh.shape[axis] for axis in self.sharding.experts)

    @property
    def local_experts(self) -> int:
        """``E / D``, the number of experts on each device."""
        return self.num_experts // self.parts

    @property
    def copies(self) -> int:
        """C, the number of copies of each expert."""
        return math.prod(self.mesh.shape[axis] for axis in self.sharding.copies)

    @property
    def has_other_axes(self) -> bool:
        """Whether the mesh has axes of several devices that shard no tokens."""
        return self.mesh.size > self.parts * self.copies

    @property
    def rows(self) -> int:
        """``T k``."""
        return self.order.shape[0]

    @property
    def slots(self) -> int:
        """The number of tiles of 128 rows that a device has room for.

        It is enough for any sizes of groups: without a capacity, all tokens may go to
        the experts of one device.
        """
        local, rows = self.local_experts, self.rows
        if self.capacity is not None:
            rows = min(rows, local * self.capacity)
        return -(-tile_count(local, rows, TILE) // self.copies)

    def tile_count(self, m: int) -> int:
        """The number of tiles of m rows on one device, at most."""
        return tile_count(self.num_experts, self.rows, m)

    @property
    def group_sizes(self) -> jax.Array:
        """The number of rows of each expert, int32 ``[E]``."""
        return jnp.sum(self.counts, axis=0, dtype=jnp.int32)

    def first_tiles(self, m: int) -> jax.Array:
        """The index on one device of each expert's first tile of m rows, ``[E]``."""
        return exclusive_sum(-(-self.group_sizes // m))

    def tiles(self, m: int) -> ExpertTiles:
        """The tiles of m rows, a divisor of 128, in the order of their places."""
        local = self.local_experts
        counts = (-(-self.group_sizes // TILE)).reshape(self.parts, local)
        ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
        share = -(-ends[:, -1] // self.copies)
        copy = jnp.arange(self.copies, dtype=jnp.int32)
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        place = copy[None, :, None] * share[:, None, None] + slot[None, None, :]
        group = jnp.sum(
            place[..., None] >= ends[:, None, None], axis=3, dtype=jnp.int32
        )
        group = jnp.where(slot[None, None, :] < share[:, None, None], group, local)
        part = jnp.arange(self.parts, dtype=jnp.int32)[:, None, None]
        expert = part * local + jnp.minimum(group, local - 1)
        starts = (ends - counts).reshape(-1)
        first = (place - starts[expert]) * TILE
        split = jnp.arange(TILE // m, dtype=jnp.int32) * m
        first, expert, group = (
            jnp.broadcast_to(x[..., None], (*x.shape, TILE // m))
            for x in (first, expert, group)
        )
        first = first + split[None, None, None, :]
        rows = jnp.clip(self.group_sizes[expert] - first, 0, m)
        rows = jnp.where(group < local, rows, 0)
        index = self.first_tiles(m)[expert] + first // m
        index = jnp.clip(index, 0, self.tile_count(m) - 1)
        shape = self.parts, self.copies, -1
        return ExpertTiles(*(x.reshape(shape) for x in (group, rows, index)))

    def used_tiles(self, m: int) -> jax.Array:
        """The number of tiles of m rows that hold rows, int32 ``[]``."""
        return jnp.sum(-(-self.group_sizes // m), dtype=jnp.int32)

    def over_devices(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """``shard_map`` over the axes of tokens; other axes stay automatic."""
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*self.sharding.axes},
            check_vma=False,
        )
        # Outside of jit, shard_map would run one primitive after the other.
        return jax.jit(mapped)

    @property
    def by_token(self) -> P:
        """The specification of arrays of tokens."""
        return P(self.sharding.axes)

    @property
    def by_expert(self) -> P:
        """The specification of arrays ``[D, C, ...]``."""
        return P(self.sharding.experts, self.sharding.copies or None)


def exchange_plan(
    sharding: ExpertSharding,
    experts: jax.Array,
    num_experts: int,
    capacity: int | None,
    sort: Callable[..., Any],
) -> Exchange:
    """Plans the exchange of tokens.

    Args:
      sharding: the mesh axes.
      experts: int32 ``[T, k]``, the experts of each token.
      num_experts: E.
      capacity: the most rows of an expert, which drops its last ones; None for all.
      sort: ``fbq_jax.experts.mlp.dispatch``.

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
    plan = Exchange(empty, empty, empty, sharding, mesh, capacity)

    def local(experts: jax.Array) -> tuple[jax.Array, ...]:
        sizes = sort(experts, num_experts).group_sizes
        counts = lax.all_gather(sizes, sharding.axes)
        if capacity is not None:
            counts = jnp.clip(capacity - exclusive_sum(counts), 0, counts)
        kept = None if capacity is None else counts[lax.axis_index(sharding.axes)]
        order, positions, *_ = sort(experts, num_experts, kept)
        return order, positions, counts

    run = plan.over_devices(local, plan.by_token, (plan.by_token, plan.by_token, P()))
    order, positions, counts = lax.optimization_barrier(run(experts))
    return Exchange(order, positions, counts, sharding, mesh, capacity)
