"""Moves rows between the devices of their tokens and of their experts.

Rows arrive where products read them, in the tiles of their expert, and outputs return
to the rows that they were computed from: nothing is sorted on the way.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fbq_jax.experts.plan import TILE, Exchange
from fbq_jax.sharding.ragged_exchange import Slices, exchange_slices, exclusive_sum


class RowSlices(NamedTuple):
    """What each device sends to each copy of each expert; int32 ``[S, C, E]``.

    Attributes:
      starts: where the slice begins among the rows, or units, of its sender.
      sizes: its size.
      targets: where it begins among the rows, or units, of its receiver.
    """

    starts: jax.Array
    sizes: jax.Array
    targets: jax.Array


def row_slices(
    plan: Exchange, m: int = TILE, units: jax.Array | None = None
) -> RowSlices:
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
    before_tile, first = exclusive_sum(m * units), plan.first_tiles(m)

    def place(expert: jax.Array, row: jax.Array) -> jax.Array:
        """The units before a row of an expert, on one device with whole tiles."""
        tile = jnp.minimum(first[expert] + row // m, len(units) - 1)
        return before_tile[tile] + row % m * units[tile]

    local = plan.local_experts
    tiles = -(-sizes // TILE).reshape(plan.parts, local)
    share = -(-jnp.sum(tiles, axis=1, dtype=jnp.int32) // plan.copies)  # [D]
    copy = jnp.arange(plan.copies, dtype=jnp.int32)[:, None]
    # The range of rows of each expert that each copy has, [C, E].
    start = exclusive_sum(tiles, axis=1).reshape(1, -1)
    low = (copy * jnp.repeat(share, local)[None] - start) * TILE
    high = low + jnp.repeat(share, local)[None] * TILE
    low, high = (jnp.clip(x, 0, sizes[None]) for x in (low, high))
    # Each copy starts at the place of its first tile, which may have any expert.
    expert = jnp.arange(len(plan), dtype=jnp.int32)
    first_place = jnp.where(
        high > low, place(expert[None], low), jnp.iinfo(jnp.int32).max
    )
    origin = jnp.min(first_place.reshape(plan.copies, plan.parts, local), axis=2)
    origin = jnp.repeat(origin, local, axis=1)

    begin = exclusive_sum(counts)  # [S, E], the first row of each device's rows
    first_own, end_own = (place(expert[None], x) for x in (begin, begin + counts))
    before_own = exclusive_sum(end_own - first_own, axis=1)

    def place_in_copy(row: jax.Array) -> jax.Array:
        """The place of the closest row that the copy has, ``[S, C, E]``."""
        row = jnp.clip(row[:, None], low[None], high[None])
        return place(expert[None, None], row)

    at, end = map(place_in_copy, (begin, begin + counts))
    starts = (before_own - first_own)[:, None] + at
    slices = RowSlices(starts, end - at, at - origin[None])
    # An empty slice begins anywhere, also where there is nothing.
    return RowSlices(*(jnp.where(end > at, x, 0) for x in slices))


def to_experts(plan: Exchange, x: jax.Array, size: int, slices: RowSlices) -> jax.Array:
    """Inside ``over_devices``: sends rows to the devices of their experts."""
    sent, received = _sent(plan, slices), _received(plan, slices)
    exchanged = Slices(*sent, received.sizes, received.targets)
    return exchange_slices(x, size, exchanged, plan.sharding.axes)


def _to_tokens(plan: Exchange, x: jax.Array, size: int) -> jax.Array:
    """Inside ``over_devices``: the reverse of ``to_experts``."""
    slices = row_slices(plan)
    back, kept = _received(plan, slices), _sent(plan, slices)
    exchanged = Slices(back.targets, back.sizes, back.starts, kept.sizes, kept.starts)
    return exchange_slices(x, size, exchanged, plan.sharding.axes)


def _sent(plan: Exchange, slices: RowSlices) -> RowSlices:
    """The slices that this device sends to experts, int32 ``[C E]``."""
    return RowSlices(*(x[plan.device].reshape(-1) for x in slices))


def _received(plan: Exchange, slices: RowSlices) -> RowSlices:
    """The slices that this device's experts receive, int32 ``[S E / D]``."""
    local = plan.local_experts

    def of_experts(x: jax.Array) -> jax.Array:
        own = x[:, plan.copy]
        return lax.dynamic_slice_in_dim(own, plan.part * local, local, 1).reshape(-1)

    return RowSlices(*map(of_experts, slices))


def send_rows(plan: Exchange, x: jax.Array) -> jax.Array:
    """Rows of tokens as rows of experts.

    Args:
      plan: the plan.
      x: tokens ``[T, K]``, or one row ``[T, k, K]`` for each expert of a token.

    Returns:
      ``[D, C, R, K]``, with R of a multiple of 128 rows and zeros for missing ones.
    """

    def local(plan: Exchange, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])[token_of(plan.order, x)]
        return to_experts(plan, rows, plan.slots, row_slices(plan))[None, None]

    return plan.over_devices(local, (plan.by_token,), plan.by_expert)(x)


def return_rows(plan: Exchange, y: jax.Array) -> jax.Array:
    """Returns rows of experts ``[D, C, R, N]`` to their tokens, as ``[T, k, N]``.

    Dropped rows are zeros.
    """

    def local(plan: Exchange, y: jax.Array) -> jax.Array:
        return _to_tokens(plan, y[0, 0], plan.order.size)[plan.positions]

    return plan.over_devices(local, (plan.by_expert,), plan.by_token)(y)


def sum_rows(y: jax.Array) -> jax.Array:
    """The sum over each token's rows ``[T, k, K]``, in float32, in the dtype of y."""
    return jnp.sum(y.astype(jnp.float32), axis=1).astype(y.dtype)


def token_of(order: jax.Array, x: jax.Array) -> jax.Array:
    """The row of x, tokens or one row for each of their experts, of each sorted row."""
    return order // (order.size // len(x)) if x.ndim == 2 else order


def float_dot(plan: Exchange, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """``lax.ragged_dot`` on each device, unquantized.

    Args:
      plan: the plan, which says what lhs and the result are.
      lhs: as ``Exchange.sends`` says.
      rhs: ``[E, K, N]``.
    """
    tiles = plan.tiles(TILE)
    lhs = _send(plan, lhs) if plan.sends else lhs
    is_of = jax.nn.one_hot(tiles.groups, plan.local_experts, dtype=jnp.int32)
    row = jnp.arange(TILE, dtype=jnp.int32)[None, None, None, :]
    is_row = (row < tiles.row_counts[..., None]).reshape(*lhs.shape[:3], 1)

    def local(
        _: Exchange, lhs: jax.Array, is_row: jax.Array, rhs: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        # A quantized dot leaves values without a meaning in missing rows.
        rows = jnp.where(is_row, lhs, jnp.zeros_like(lhs))[0, 0]
        return lax.ragged_dot(rows, rhs, sizes[0, 0])[None, None]

    by_expert, by_part = plan.by_expert, P(plan.sharding.experts)
    specs = by_expert, by_expert, by_part, by_expert
    run = plan.over_devices(local, specs, by_expert)
    y = run(lhs, is_row, rhs, TILE * jnp.sum(is_of, axis=2))
    return y if plan.sends else _return(plan, y)


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
