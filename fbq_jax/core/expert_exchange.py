"""Experts on several devices: tokens go to their experts as INT8 codes.

Each device quantizes its own tokens, sends each expert's codes to the device that has
the expert, and gets the outputs back.  The codes and scales are those of one device,
bit for bit:

- An expert's rows are in the order of all tokens, so its blocks hold the same rows on
  any number of devices.  The tokens of a block may lie on several devices, which agree
  on its scale by an all-reduced maximum (one float32 per block).
- A row's noise depends on its block and its place in it.

One device of the experts may stand for several that have copies of them (the mesh axes
``ExpertSharding.copies``).  These share its rows in whole tiles of 128, so that no
block is split.  An exchange therefore spans the mesh axes of experts and of copies.

What a row sends for ``X``, in bytes per value: 1 for the codes of the forward GEMM; a
quarter if dW rounds them stochastically, where codes differ by -1, 0 or 1; and 1 in
blocks that fall back.  ``dY`` takes 1.  bfloat16 would take 2.  Scales are not sent:
each device has those of all blocks.
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

from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.sharding.assignment import MeshAxes
from fbq_jax.sharding.ragged_exchange import Slices, exchange_slices

#: The rows of each expert start at multiples of this on the expert's device.  It is a
#: multiple of the rows of every block.
TILE = 128


@dataclasses.dataclass(frozen=True)
class ExpertSharding:
    """The mesh axes of a mixture of experts.

    Experts are sharded over ``experts``.  Tokens are sharded over ``copies`` and
    ``experts``, in this order.  The mesh is that of ``jax.set_mesh``.

    Attributes:
      experts: the mesh axis, or axes, with different experts.
      copies: the axes with different tokens but copies of the experts, such as those of
        data parallelism.

    Raises:
      ValueError: there is no axis of experts, or an axis occurs twice.

    >>> ExpertSharding("expert", copies="data")
    ExpertSharding(experts=('expert',), copies=('data',))
    """

    experts: str | MeshAxes
    copies: str | MeshAxes = ()

    def __post_init__(self) -> None:
        for name in ("experts", "copies"):
            axes = getattr(self, name)
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            object.__setattr__(self, name, axes)
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
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if any(types.get(axis) != AxisType.Auto for axis in self.axes):
            raise ValueError(
                f"experts are sharded over the mesh axes {self.axes}, which takes a "
                "mesh with these axes, of type AxisType.Auto, set by jax.set_mesh; got "
                f"{mesh}"
            )
        return mesh


class Tiles(NamedTuple):
    """The tiles of ``m`` rows on each device; all fields have the shape ``[D, C, T]``.

    D devices have different experts, each with C copies.

    Attributes:
      groups: int32, the tile's expert among those of its device, in ascending order;
        their number for a tile after the last one.
      rows: int32, the number of rows of the tile.
      index: int32, the index of the tile on one device; arbitrary without rows.
    """

    groups: jax.Array
    rows: jax.Array
    index: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "positions", "counts"],
    meta_fields=["sharding", "mesh", "capacity"],
)
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Which rows devices exchange, for S devices with ``T / S`` tokens each.

    ``order`` and ``positions`` are those of ``fbq_jax.core.experts.Dispatch`` on each
    device, for its own tokens.

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
    def copies(self) -> int:
        """C, the number of copies of each expert."""
        return math.prod(self.mesh.shape[axis] for axis in self.sharding.copies)

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
        local = self.num_experts // self.parts
        rows = self.rows
        if self.capacity is not None:
            rows = min(rows, local * self.capacity)
        tiles = (rows + min(local, rows) * (TILE - 1)) // TILE
        return -(-tiles // self.copies)

    def tile_count(self, m: int) -> int:
        """The number of tiles of m rows on one device, at most."""
        return (self.rows + min(self.num_experts, self.rows) * (m - 1)) // m

    @property
    def group_sizes(self) -> jax.Array:
        """The number of rows of each expert, int32 ``[E]``."""
        return jnp.sum(self.counts, axis=0, dtype=jnp.int32)

    def first_tiles(self, m: int) -> jax.Array:
        """The index on one device of each expert's first tile of m rows, ``[E]``."""
        return _exclusive_sum(-(-self.group_sizes // m))

    def tiles(self, m: int) -> Tiles:
        """The tiles of m rows, a divisor of 128, in the order of their places."""
        local = self.num_experts // self.parts
        counts = (-(-self.group_sizes // TILE)).reshape(self.parts, local)
        ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
        share = -(-ends[:, -1] // self.copies)
        copy = jnp.arange(self.copies, dtype=jnp.int32)
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        place = copy[None, :, None] * share[:, None, None] + slot[None, None, :]
        group = jnp.sum(place[..., None] >= ends[:, None, None], axis=3, dtype=jnp.int32)
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
        return Tiles(*(x.reshape(shape) for x in (group, rows, index)))

    def used_tiles(self, m: int) -> jax.Array:
        """The number of tiles of m rows that hold rows, int32 ``[]``."""
        return jnp.sum(-(-self.group_sizes // m), dtype=jnp.int32)

    def over_devices(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """``shard_map`` over the axes of tokens; other axes stay automatic."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*self.sharding.axes},
            check_vma=False,
        )

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
      sort: ``fbq_jax.core.experts.dispatch``.

    Raises:
      ValueError: the mesh does not fit, or E or T is no multiple of its devices.
    """
    mesh = sharding.mesh()
    parts = math.prod(mesh.shape[axis] for axis in sharding.experts)
    devices = math.prod(mesh.shape[axis] for axis in sharding.axes)
    if num_experts % parts or len(experts) % devices:
        raise ValueError(
            f"experts over the mesh axes {sharding.experts} of {parts} devices, with "
            f"tokens over {sharding.axes} of {devices}, take multiples of these "
            f"numbers; got {num_experts} experts and {len(experts)} tokens"
        )
    empty = jnp.zeros(0, jnp.int32)
    plan = Exchange(empty, empty, empty, sharding, mesh, capacity)

    def local(experts: jax.Array) -> tuple[jax.Array, ...]:
        sizes = sort(experts, num_experts).group_sizes
        counts = lax.all_gather(sizes, sharding.axes)
        if capacity is not None:
            counts = jnp.clip(capacity - _exclusive_sum(counts), 0, counts)
        kept = None if capacity is None else counts[lax.axis_index(sharding.axes)]
        order, positions, *_ = sort(experts, num_experts, kept)
        return order, positions, counts

    run = plan.over_devices(
        local, plan.by_token, (plan.by_token, plan.by_token, P())
    )
    order, positions, counts = lax.optimization_barrier(run(experts))
    return Exchange(order, positions, counts, sharding, mesh, capacity)


def _exclusive_sum(x: jax.Array) -> jax.Array:
    """The sums of the values before each one, along the first axis."""
    return jnp.cumsum(x, axis=0, dtype=jnp.int32) - x


class _Slices(NamedTuple):
    """What each device sends to each copy of each expert; int32 ``[S, C, E]``.

    Attributes:
      starts: where the slice begins among the rows, or units, of its sender.
      sizes: its size.
      targets: where it begins among those of its receiver.
    """

    starts: jax.Array
    sizes: jax.Array
    targets: jax.Array


def _slices(
    plan: Exchange, m: int = TILE, units: jax.Array | None = None
) -> _Slices:
    """The slices of an exchange.

    Args:
      plan: the plan.
      m: the rows of a tile.
      units: int32 ``[tile_count(m)]``, how many units each row of a tile sends; None
        for one.
    """
    sizes, counts = plan.group_sizes, plan.counts
    if units is None:
        units = jnp.ones(plan.tile_count(m) + 1, jnp.int32)
    else:
        units = jnp.append(units, jnp.zeros(1, jnp.int32))
    before_tile, first = _exclusive_sum(m * units), plan.first_tiles(m)

    def place(expert: jax.Array, row: jax.Array) -> jax.Array:
        """The units before a row of an expert, on one device with whole tiles."""
        tile = jnp.minimum(first[expert] + row // m, len(units) - 1)
        return before_tile[tile] + row % m * units[tile]

    local = plan.num_experts // plan.parts
    tiles = -(-sizes // TILE).reshape(plan.parts, local)
    share = -(-jnp.sum(tiles, axis=1, dtype=jnp.int32) // plan.copies)  # [D]
    copy = jnp.arange(plan.copies, dtype=jnp.int32)[:, None]
    # The range of rows of each expert that each copy has, [C, E].
    start = _exclusive_sum(tiles.T).T.reshape(1, -1)
    low = (copy * jnp.repeat(share, local)[None] - start) * TILE
    high = low + jnp.repeat(share, local)[None] * TILE
    low, high = (jnp.clip(x, 0, sizes[None]) for x in (low, high))
    # The first place of each copy: that of its first tile, which may have any expert.
    expert = jnp.arange(plan.num_experts, dtype=jnp.int32)
    has_rows = high > low
    first_place = jnp.where(has_rows, place(expert[None], low), jnp.iinfo(jnp.int32).max)
    origin = jnp.min(first_place.reshape(plan.copies, plan.parts, local), axis=2)
    origin = jnp.repeat(origin, local, axis=1)

    begin = _exclusive_sum(counts)  # [S, E], the first row of each device's rows
    row = begin[:, None], (begin + counts)[:, None]
    row = tuple(jnp.clip(x, low[None], high[None]) for x in row)
    at, end = (place(expert[None, None], x) for x in row)
    own = place(expert[None], begin), place(expert[None], begin + counts)
    local_start = _exclusive_sum((own[1] - own[0]).T).T
    starts = local_start[:, None] + at - own[0][:, None]
    slices = _Slices(starts, end - at, at - origin[None])
    return _Slices(*(jnp.where(end > at, x, 0) for x in slices))


def _to_experts(plan: Exchange, x: jax.Array, size: int, slices: _Slices) -> jax.Array:
    """Inside ``over_devices``: sends rows to the devices of their experts."""
    local = plan.num_experts // plan.parts
    index = lax.axis_index(plan.sharding.axes)
    copy, part = index // plan.parts, index % plan.parts
    sent = Slices(
        *(x[index].reshape(-1) for x in slices),
        received=_of_part(slices.sizes[:, copy], part, local),
    )
    return exchange_slices(x, size, sent, plan.sharding.axes)


def _to_tokens(plan: Exchange, x: jax.Array, size: int, slices: _Slices) -> jax.Array:
    """Inside ``over_devices``: the reverse of ``_to_experts``."""
    local = plan.num_experts // plan.parts
    index = lax.axis_index(plan.sharding.axes)
    copy, part = index // plan.parts, index % plan.parts
    of_part = functools.partial(_of_part, part=part, local=local)
    targets, sizes, starts = (of_part(x[:, copy]) for x in slices)
    received = slices.sizes[index].reshape(-1)
    sent = Slices(starts, sizes, targets, received)
    return exchange_slices(x, size, sent, plan.sharding.axes)


def _of_part(x: jax.Array, part: jax.Array, local: int) -> jax.Array:
    """The columns ``[S, E / D]`` of a part's experts, flattened."""
    return lax.dynamic_slice_in_dim(x, part * local, local, axis=1).reshape(-1)


def send_rows(plan: Exchange, x: jax.Array) -> jax.Array:
    """Rows of tokens as rows of experts.

    Args:
      plan: the plan.
      x: tokens ``[T, K]``, or one row ``[T, k, K]`` for each expert of a token.

    Returns:
      ``[D, C, R, K]``, with R of a multiple of 128 rows and zeros for missing ones.
    """

    def local(x: jax.Array, order: jax.Array, slices: _Slices) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])[_sources(order, x)]
        return _to_experts(plan, rows, plan.slots * TILE, slices)[None, None]

    specs = plan.by_token, plan.by_token, P()
    run = plan.over_devices(local, specs, plan.by_expert)
    return run(x, plan.order, _slices(plan))


def return_rows(plan: Exchange, y: jax.Array) -> jax.Array:
    """Rows of experts ``[D, C, R, N]`` as those of tokens ``[T, k, N]``.

    Dropped rows are zeros.
    """

    def local(y: jax.Array, positions: jax.Array, slices: _Slices) -> jax.Array:
        return _to_tokens(plan, y[0, 0], positions.size, slices)[positions]

    specs = plan.by_expert, plan.by_token, P()
    run = plan.over_devices(local, specs, plan.by_token)
    return run(y, plan.positions, _slices(plan))


def sum_rows(y: jax.Array) -> jax.Array:
    """The sum over each token's rows ``[T, k, K]``, in float32, in the dtype of y."""
    return jnp.sum(y.astype(jnp.float32), axis=1).astype(y.dtype)


def _sources(order: jax.Array, x: jax.Array) -> jax.Array:
    """The row of x, tokens or one row for each of their experts, of each sorted row."""
    return order // (order.size // len(x)) if x.ndim == 2 else order


class TokenRows(NamedTuple):
    """Rows of tokens, to be quantized where they lie and sent to their experts.

    Attributes:
      values: as for ``send_rows``, bfloat16, float16 or float32.
      plan: the plan.
    """

    values: jax.Array
    plan: Exchange


class ExpertRows(NamedTuple):
    """Rows on the devices of their experts.

    Attributes:
      rows: values ``[D, C, R, K]`` with their tiles.
      index: int32 ``[D, C, T]``, the index of each tile on one device.
    """

    rows: GroupedRows
    index: jax.Array


class BlockScales(NamedTuple):
    """What all devices know of the blocks of ``TokenRows``; float32 ``[T, K/k]``.

    T is the number of tiles on one device.

    Attributes:
      scales: the scales.
      inverse: their inverses (``scale_and_inverse``).
    """

    scales: jax.Array
    inverse: jax.Array


def find_scales(
    rows: TokenRows, block: Block, main: BlockScales | None = None
) -> tuple[BlockScales, jax.Array]:
    """The scales of the blocks of all devices, and their ``max |x|``.

    Args:
      rows: the rows.
      block: rows and columns of a block.
      main: the scales of a first term, to find those of the residual; None for x.
    """
    plan, values = rows.plan, rows.values
    tiles = plan.tile_count(block[0])

    def local(
        x: jax.Array, order: jax.Array, counts: jax.Array, main: BlockScales | None
    ) -> jax.Array:
        source, here = _sources(order, x), _local_rows(plan, order, counts, block[0])
        x = x.reshape(-1, x.shape[-1])
        if main is None:
            amax = _row_amax(x.astype(jnp.float32), block[1])[source]
        else:
            amax = _row_amax(_residual(x[source], here, main, block), block[1])
        bits = lax.bitcast_convert_type(amax, jnp.int32)
        largest = jnp.zeros((tiles, bits.shape[1]), jnp.int32)
        largest = largest.at[here.tile].max(bits, mode="drop")
        return lax.pmax(largest, plan.sharding.axes)

    specs = plan.by_token, plan.by_token, P(), P()
    bits = plan.over_devices(local, specs, P())(values, plan.order, plan.counts, main)
    amax = lax.bitcast_convert_type(bits, jnp.float32)
    return BlockScales(*scale_and_inverse(amax)), amax


class _LocalRows(NamedTuple):
    """The place of a device's sorted rows on one device; int32 ``[T k / S]``.

    Attributes:
      tile: the index of each row's tile, and the number of tiles for a dropped row.
      row: the row in the tile.
    """

    tile: jax.Array
    row: jax.Array


def _local_rows(
    plan: Exchange, order: jax.Array, counts: jax.Array, m: int
) -> _LocalRows:
    """Inside ``over_devices``: where the rows of this device are."""
    index = lax.axis_index(plan.sharding.axes)
    begin, sizes = _exclusive_sum(counts)[index], counts[index]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    position = jnp.arange(order.size, dtype=jnp.int32)
    expert = jnp.sum(position[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    is_kept = expert < len(ends)
    expert = jnp.minimum(expert, len(ends) - 1)
    row = begin[expert] + position - (ends - sizes)[expert]
    first = _exclusive_sum(-(-jnp.sum(counts, axis=0, dtype=jnp.int32) // m))
    tile = jnp.where(is_kept, first[expert] + row // m, plan.tile_count(m))
    # Without the barrier, XLA would compute tiles again for each element of a row.
    return lax.optimization_barrier(_LocalRows(tile, row % m))


def _in_blocks(x: jax.Array, side: int) -> jax.Array:
    """Pads ``[R, C]`` and splits it into ``[R, C/c, c]``."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % side)))
    return x.reshape(len(x), -1, side)


def _row_amax(x: jax.Array, side: int) -> jax.Array:
    return find_amax(_in_blocks(x, side), 2)


def _spread(per_block: jax.Array, here: _LocalRows, side: int, width: int) -> jax.Array:
    """The value of each row's block, for each element ``[R, width]``."""
    rows = per_block.at[here.tile].get(mode="fill", fill_value=0)
    return jnp.repeat(rows, side, axis=1)[:, :width]


def _codes(
    x: jax.Array,
    here: _LocalRows,
    inverse: jax.Array,
    side: int,
    seeds: jax.Array | None = None,
) -> jax.Array:
    """Codes of rows ``[R, C]``, as float32; seeds ``[T]`` of stochastic rounding."""
    noise = None
    if seeds is not None:
        seeds = seeds.at[here.tile].get(mode="fill", fill_value=0)
        noise = rounding.noise_of_rows(seeds, here.row, x.shape[1])
    inverse = _spread(inverse, here, side, x.shape[1])
    return reference.round_to_codes(x.astype(jnp.float32), inverse, noise)


def _residual(
    x: jax.Array, here: _LocalRows, main: BlockScales, block: Block
) -> jax.Array:
    codes = _codes(x, here, main.inverse, block[1])
    scales = _spread(main.scales, here, block[1], x.shape[1])
    return reference.residual_of(x.astype(jnp.float32), codes, scales)


def quantize_tokens(
    rows: TokenRows,
    seeds: rounding.Seeds,
    found: BlockScales,
    *,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    sums: bool = False,
) -> Layouts:
    """Quantizes rows and sends their codes: ``ops.ragged_quantize`` of ``ExpertRows``.

    Args:
      rows: the rows.
      seeds: the seeds of stochastic rounding, of all tiles on one device.
      found: the scales.
      block: rows and columns of a block; its rows divide 128.
      rowwise: the rounding of the rowwise codes; None to omit this layout.
      colwise: the rounding of the colwise codes; None to omit this layout.
      sums: whether the colwise layout gets sums of codes.

    Returns:
      Rowwise codes ``[D, C, T, m, K]`` and colwise codes ``[D, C, T, K, m]``.
    """
    plan, m = rows.plan, block[0]
    roundings = tuple(dict.fromkeys(r for r in (rowwise, colwise) if r is not None))

    def local(
        x: jax.Array,
        order: jax.Array,
        counts: jax.Array,
        found: BlockScales,
        seeds: jax.Array,
        slices: _Slices,
    ) -> list[jax.Array]:
        here = _local_rows(plan, order, counts, m)
        x = x.reshape(-1, x.shape[-1])[_sources(order, x)]
        codes = [
            _codes(x, here, found.inverse, block[1], seeds if r == "stochastic" else None)
            for r in roundings
        ]
        sent = [codes[0].astype(jnp.int8)]
        if len(codes) > 1:
            sent.append(_pack_steps(codes[1] - codes[0]))
        size = plan.slots * TILE
        return [_to_experts(plan, x, size, slices)[None, None] for x in sent]

    specs = plan.by_token, plan.by_token, P(), P(), P(), P()
    run = plan.over_devices(local, specs, plan.by_expert)
    operands = plan.counts, found, rounding.fold_seeds(seeds), _slices(plan)
    first, *steps = run(rows.values, plan.order, *operands)
    shape = *first.shape[:2], -1, m, first.shape[-1]
    codes = {roundings[0]: first.reshape(shape)}
    if steps:
        step = _unpack_steps(steps[0], first.shape[-1])
        codes[roundings[1]] = (first + step).reshape(shape)
    scales = tile_scales(plan.tiles(m), found.scales)
    main = None if rowwise is None else Quantized(codes[rowwise], scales)
    transposed = None
    if colwise is not None:
        transposed = Quantized(codes[colwise].mT, scales.mT)
        if sums:
            transposed = transposed._replace(sums=_sums(transposed.codes, block[1]))
    return Layouts(main, transposed)


def _sums(codes: jax.Array, side: int) -> jax.Array:
    """``Quantized.sums`` of colwise codes ``[D, C, T, K, m]``."""
    sums = jnp.sum(jnp.abs(codes.astype(jnp.int32)), axis=4)
    sums = jnp.pad(sums, ((0, 0),) * 3 + ((0, -sums.shape[3] % side),))
    largest = jnp.max(sums.reshape(*sums.shape[:3], -1, side), axis=4)
    return largest[..., None].astype(jnp.float32)


def tile_scales(tiles: Tiles, scales: jax.Array) -> jax.Array:
    """Scales ``[T, K/k]`` of all tiles as those on each device, ``[D, C, T, 1, K/k]``.

    They are 0 for tiles without rows.
    """
    own = scales[tiles.index]
    return jnp.where(tiles.rows[..., None] > 0, own, 0.0)[:, :, :, None, :]


def _pack_steps(x: jax.Array) -> jax.Array:
    """Packs values -1, 0 and 1 ``[R, C]`` to four per byte, int8 ``[R, ceil(C/4)]``."""
    fields = _in_blocks(x.astype(jnp.int32) & 3, 4)
    shifts = jnp.arange(0, 8, 2, dtype=jnp.int32)[None, None]
    return jnp.sum(fields << shifts, axis=2, dtype=jnp.int32).astype(jnp.int8)


def _unpack_steps(packed: jax.Array, columns: int) -> jax.Array:
    """The reverse of ``_pack_steps``: int8 ``[..., columns]``."""
    # Shifted to the left end of 32 bits and back, a field keeps its sign.
    shifts = jnp.expand_dims(jnp.arange(30, 22, -2, dtype=jnp.int32), range(packed.ndim))
    fields = packed[..., None].astype(jnp.int32) << shifts >> 30
    fields = fields.reshape(*packed.shape[:-1], -1)[..., :columns]
    return fields.astype(jnp.int8)


def quantize_residuals(
    rows: TokenRows,
    main: BlockScales,
    found: BlockScales,
    *,
    block: Block,
) -> Quantized:
    """Quantizes the second term and sends the codes of blocks that have one.

    Args:
      rows: the rows.
      main: the scales of the first term.
      found: the scales of the second term; 0 in blocks without one.
      block: rows and columns of a block.

    Returns:
      Codes ``[D, C, T, m, K]``, 0 in blocks without a second term, and their scales.
    """
    plan, (m, side) = rows.plan, block
    width = rows.values.shape[-1]

    def falls_of(found: BlockScales) -> jax.Array:
        return found.scales > 0.0  # [T, K/k]

    def local(
        x: jax.Array,
        order: jax.Array,
        counts: jax.Array,
        main: BlockScales,
        found: BlockScales,
        slices: _Slices,
        places: jax.Array,
    ) -> jax.Array:
        here = _local_rows(plan, order, counts, m)
        x = x.reshape(-1, width)[_sources(order, x)]
        residual = _residual(x, here, main, block)
        codes = _codes(residual, here, found.inverse, side)
        codes = _in_blocks(codes.astype(jnp.int8), side).reshape(-1, side)
        # The parts of rows in blocks that fall back, in their order.
        is_sent = falls_of(found).at[here.tile].get(mode="fill", fill_value=False)
        (index,) = jnp.nonzero(is_sent.reshape(-1), size=is_sent.size, fill_value=0)
        size = plan.slots * TILE * is_sent.shape[1]
        sent = _to_experts(plan, codes[index], size, slices)
        received = sent.at[places[0, 0]].get(mode="fill", fill_value=0)
        return received.reshape(*places.shape[:4], -1)[..., :width]

    by_token, by_expert = plan.by_token, plan.by_expert
    specs = by_token, by_token, P(), P(), P(), P(), by_expert
    run = plan.over_devices(local, specs, by_expert)
    units = jnp.sum(falls_of(found), axis=1, dtype=jnp.int32)
    tiles = plan.tiles(m)
    places = _unit_places(tiles, units, falls_of(found), m)
    operands = plan.counts, main, found, _slices(plan, m, units), places
    codes = run(rows.values, plan.order, *operands)
    return Quantized(codes, tile_scales(tiles, found.scales))


def _unit_places(
    tiles: Tiles, units: jax.Array, falls: jax.Array, m: int
) -> jax.Array:
    """Where a device receives the residual of each part of a row.

    Args:
      tiles: the tiles of the devices.
      units: int32 ``[T]``, the blocks of each tile on one device that fall back.
      falls: bool ``[T, K/k]``, which ones do.
      m: the rows of a tile.

    Returns:
      int32 ``[D, C, T, m, K/k]``; beyond the end for those without a residual.
    """
    last = jnp.iinfo(jnp.int32).max
    has_rows = tiles.rows > 0
    first = jnp.where(has_rows, _exclusive_sum(m * units)[tiles.index], last)
    first -= jnp.min(first, axis=2, keepdims=True)
    falls = falls[tiles.index]
    rank = jnp.cumsum(falls, axis=3, dtype=jnp.int32) - 1
    row = jnp.arange(m, dtype=jnp.int32)[None, None, None, :]
    of_row = first[..., None] + row * units[tiles.index][..., None]
    is_sent = falls[..., None, :] & (row < tiles.rows[..., None])[..., None]
    return jnp.where(is_sent, of_row[..., None] + rank[..., None, :], last)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["plan"], meta_fields=["sends"]
)
@dataclasses.dataclass(frozen=True)
class ExchangedGroups:
    """The groups of a ragged dot whose rows are exchanged before or after it.

    It takes the place of the sizes of the groups.

    Attributes:
      plan: the plan.
      sends: True if lhs is tokens ``[T, K]``, whose rows are sent, and the output
        ``[D, C, R, N]`` is on the devices of the experts; False if lhs is there, and
        the output returns to the tokens as ``[T, k, N]``.
    """

    plan: Exchange
    sends: bool

    def __len__(self) -> int:
        """The number of experts."""
        return self.plan.num_experts

    def float_dot(self, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        """``lax.ragged_dot`` on each device, unquantized.

        Args:
          lhs: as the class says.
          rhs: ``[E, K, N]``.
          **options: those of ``lax.ragged_dot``.
        """
        plan, tiles = self.plan, self.plan.tiles(TILE)
        lhs = _send(plan, lhs) if self.sends else lhs
        is_of = jax.nn.one_hot(
            tiles.groups, plan.num_experts // plan.parts, dtype=jnp.int32
        )
        row = jnp.arange(TILE, dtype=jnp.int32)[None, None, None, :]
        is_row = (row < tiles.rows[..., None]).reshape(*lhs.shape[:3], 1)

        def local(
            lhs: jax.Array, is_row: jax.Array, rhs: jax.Array, sizes: jax.Array
        ) -> jax.Array:
            # A quantized dot leaves values without a meaning in missing rows.
            rows = jnp.where(is_row, lhs, jnp.zeros_like(lhs))[0, 0]
            return lax.ragged_dot(rows, rhs, sizes[0, 0], **options)[None, None]

        by_expert, by_part = plan.by_expert, P(plan.sharding.experts)
        specs = by_expert, by_expert, by_part, by_expert
        run = plan.over_devices(local, specs, by_expert)
        y = run(lhs, is_row, rhs, TILE * jnp.sum(is_of, axis=2))
        return y if self.sends else _return(plan, y)


@jax.custom_vjp
def _send(plan: Exchange, x: jax.Array) -> jax.Array:
    """``send_rows`` of tokens ``[T, K]``, with a gradient."""
    return send_rows(plan, x)


_send.defvjp(
    lambda plan, x: (send_rows(plan, x), plan),
    lambda plan, grad: (None, sum_rows(return_rows(plan, grad))),
)


@jax.custom_vjp
def _return(plan: Exchange, y: jax.Array) -> jax.Array:
    """``return_rows``, with a gradient."""
    return return_rows(plan, y)


_return.defvjp(
    lambda plan, y: (return_rows(plan, y), plan),
    lambda plan, grad: (None, send_rows(plan, grad)),
)
