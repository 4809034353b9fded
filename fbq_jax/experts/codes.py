"""Tokens go to experts on other devices as INT8 codes.

Each device quantizes its own rows.  The codes and scales are as on one device, bit
for bit: the rows of a block may lie on several devices, which agree on its scale by an
all-reduced maximum (one float32 per block), and a row's noise depends on its block and
its place in it.

What a row of ``X`` sends, in bytes per value: 1 for the codes of the forward GEMM; a
quarter if dW rounds them stochastically, where codes differ by -1, 0 or 1; and 1 in
blocks that fall back.  ``dY`` takes 1.  bfloat16 would take 2.  Scales are not sent:
each device has the scales of all blocks.

Quantization runs as XLA ops, which read tokens twice (once more for the residuals) and
write the codes of each token's experts.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fbq_jax.core import threshold
from fbq_jax.core.noise import LHS_STREAM, seeds_of
from fbq_jax.core.spec import Plan, Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.experts.exchange import (
    RowSlices,
    row_slices,
    to_experts,
    token_of,
)
from fbq_jax.experts.plan import TILE, Exchange, ExpertTiles
from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.quantized import Layouts, Quantized, Term
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.sharding.ragged_exchange import exclusive_sum


class TokenRows(NamedTuple):
    """Rows of tokens, to be quantized where they lie and sent to their experts.

    Attributes:
      values: as for ``send_rows``, bfloat16, float16 or float32.
      plan: the plan.
      m: the rows of a tile, and of a block.
    """

    values: jax.Array
    plan: Exchange
    m: int

    @property
    def indices(self) -> jax.Array:
        """The index of each tile on one device, int32 ``[T]``."""
        return jnp.arange(self.plan.tile_count(self.m), dtype=jnp.int32)


def quantize_tokens(rows: TokenRows, seeds: rounding.Seeds, plan: Plan) -> Layouts:
    """Quantizes rows in blocks, as ``ops.quantize`` does, and sends their codes."""
    found, _ = _find_scales(rows, _block_of(plan))
    return _quantize_tokens(rows, seeds, found, plan)


def quantize_tokens_lhs(
    rows: TokenRows,
    spec: Spec,
    plan: Plan,
    scalars: Scalars,
    *,
    blocks: jax.Array,
    frozen: bool,
) -> tuple[Layouts, Stats]:
    """``quantize_activation`` of rows that are sent to their experts.

    Blocks fall back by their largest value, which devices agree on.
    """
    block = _block_of(plan)
    if spec.recipe.criterion is None:
        stats = threshold.without_fallback(scalars, len(rows.indices))
        seeds = seeds_of(scalars.later_seed(stats), LHS_STREAM, rows.indices)
        return quantize_tokens(rows, seeds, plan), stats
    assert spec.recipe.criterion == "absmax"  # ragged_dot checks it
    found, amax = _find_scales(rows, block)
    metric = reference.metric_of("absmax", found.scales, amax=amax)[:, None, :]
    second, _ = _find_scales(rows, block, found)
    limit = jnp.where(scalars.theta >= 0.0, scalars.theta, 0.0)
    scales, stats = threshold.apply(
        scalars,
        metric,
        jnp.where(metric > limit, second.scales[:, None, :], 0.0),
        spec.recipe,
        blocks=blocks,
        frozen=frozen,
        implementation=spec.implementation,
    )
    seeds = seeds_of(scalars.call_seed, LHS_STREAM, rows.indices)
    lhs = _quantize_tokens(rows, seeds, found, plan)
    second = _BlockScales(scales[:, 0], second.inverse)
    residual = _quantize_residuals(rows, found, second, block=block)
    assert lhs.rowwise is not None
    main = dataclasses.replace(lhs.rowwise, residual=residual)
    return lhs._replace(rowwise=main), stats


def _block_of(plan: Plan) -> tuple[int, int]:
    """The rows and columns of a block, the same in both layouts."""
    layout = plan.rowwise or plan.colwise
    assert layout is not None
    r, c = layout.block
    assert r is not None
    assert c is not None
    return r, c


class _BlockScales(NamedTuple):
    """What all devices know of the blocks of ``TokenRows``; float32 ``[T, K/k]``.

    T is the number of tiles on one device.

    Attributes:
      scales: the scales.
      inverse: their inverses (``scale_and_inverse``).
    """

    scales: jax.Array
    inverse: jax.Array


def _find_scales(
    rows: TokenRows, block: tuple[int, int], main: _BlockScales | None = None
) -> tuple[_BlockScales, jax.Array]:
    """The scales of the blocks of all devices, and their ``max |x|``.

    Args:
      rows: the rows.
      block: rows and columns of a block.
      main: the scales of the first term, to find the residual's; None for x.
    """
    plan, values = rows.plan, rows.values
    tiles = plan.tile_count(block[0])

    def local(
        x: jax.Array, order: jax.Array, counts: jax.Array, main: _BlockScales | None
    ) -> jax.Array:
        source, here = token_of(order, x), _local_rows(plan, order, counts, block[0])
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
    return _BlockScales(*scale_and_inverse(amax)), amax


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
    begin, sizes = exclusive_sum(counts)[index], counts[index]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    position = jnp.arange(order.size, dtype=jnp.int32)
    expert = jnp.sum(position[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    is_kept = expert < len(ends)
    expert = jnp.minimum(expert, len(ends) - 1)
    row = begin[expert] + position - (ends - sizes)[expert]
    first = exclusive_sum(-(-jnp.sum(counts, axis=0, dtype=jnp.int32) // m))
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
    x: jax.Array, here: _LocalRows, main: _BlockScales, block: tuple[int, int]
) -> jax.Array:
    codes = _codes(x, here, main.inverse, block[1])
    scales = _spread(main.scales, here, block[1], x.shape[1])
    return reference.residual_of(x.astype(jnp.float32), codes, scales)


def _quantize_tokens(
    rows: TokenRows, seeds: rounding.Seeds, found: _BlockScales, layouts: Plan
) -> Layouts:
    """Quantizes rows with known scales, and sends their codes.

    Args:
      rows: the rows.
      seeds: the seeds of stochastic rounding, of all tiles on one device.
      found: the scales.
      layouts: the layouts, whose blocks have rows that divide 128.

    Returns:
      Rowwise codes ``[D, C, T, m, K]`` and colwise codes ``[D, C, T, K, m]``.
    """
    block, rowwise, colwise = _block_of(layouts), layouts.rowwise, layouts.colwise
    plan, m = rows.plan, block[0]
    roundings = tuple(
        dict.fromkeys(x.rounding for x in (rowwise, colwise) if x is not None)
    )

    def local(
        x: jax.Array,
        order: jax.Array,
        counts: jax.Array,
        found: _BlockScales,
        seeds: jax.Array,
        slices: RowSlices,
    ) -> list[jax.Array]:
        here = _local_rows(plan, order, counts, m)
        x = x.reshape(-1, x.shape[-1])[token_of(order, x)]
        codes = [
            _codes(
                x, here, found.inverse, block[1], seeds if r == "stochastic" else None
            )
            for r in roundings
        ]
        sent = [codes[0].astype(jnp.int8)]
        if len(codes) > 1:
            sent.append(_pack_steps(codes[1] - codes[0]))
        size = plan.slots * TILE
        return [to_experts(plan, x, size, slices)[None, None] for x in sent]

    specs = plan.by_token, plan.by_token, P(), P(), P(), P()
    run = plan.over_devices(local, specs, plan.by_expert)
    operands = plan.counts, found, rounding.fold_seeds(seeds), row_slices(plan)
    first, *steps = run(rows.values, plan.order, *operands)  # [D, C, R, K]
    shape = *first.shape[:2], -1, m, first.shape[-1]
    codes = {roundings[0]: first.reshape(shape)}
    if steps:
        step = _unpack_steps(steps[0], first.shape[-1])
        codes[roundings[1]] = (first + step).reshape(shape)
    scales = tile_scales(plan.tiles(m), found.scales)
    main = transposed = None
    if rowwise is not None:
        main = Quantized(Term(codes[rowwise.rounding], scales), None, block)
    if colwise is not None:
        term = Term(codes[colwise.rounding].mT, scales.mT)
        if colwise.sums:
            term = term._replace(sums=_sums(term.codes, block[1]))
        transposed = Quantized(term, None, block[::-1])
    return Layouts(main, transposed)


def _sums(codes: jax.Array, side: int) -> jax.Array:
    """``Quantized.sums`` of colwise codes ``[D, C, T, K, m]``."""
    sums = jnp.sum(jnp.abs(codes.astype(jnp.int32)), axis=4)
    sums = jnp.pad(sums, ((0, 0),) * 3 + ((0, -sums.shape[3] % side),))
    largest = jnp.max(sums.reshape(*sums.shape[:3], -1, side), axis=4)
    return largest[..., None].astype(jnp.float32)


def tile_scales(tiles: ExpertTiles, scales: jax.Array) -> jax.Array:
    """Scales ``[T, K/k]`` of all tiles as those on each device, ``[D, C, T, 1, K/k]``.

    They are 0 for tiles without rows.
    """
    own = scales[tiles.indices]
    return jnp.where(tiles.row_counts[..., None] > 0, own, 0.0)[:, :, :, None, :]


def _pack_steps(x: jax.Array) -> jax.Array:
    """Packs values -1, 0 and 1 ``[R, C]`` to four per byte, int8 ``[R, ceil(C/4)]``."""
    fields = _in_blocks(x.astype(jnp.int32) & 3, 4)
    shifts = jnp.arange(0, 8, 2, dtype=jnp.int32)[None, None]
    return jnp.sum(fields << shifts, axis=2, dtype=jnp.int32).astype(jnp.int8)


def _unpack_steps(packed: jax.Array, columns: int) -> jax.Array:
    """The reverse of ``_pack_steps``: int8 ``[..., columns]``."""
    # Shifted to the left end of 32 bits and back, a field keeps its sign.
    shifts = jnp.expand_dims(
        jnp.arange(30, 22, -2, dtype=jnp.int32), range(packed.ndim)
    )
    fields = packed[..., None].astype(jnp.int32) << shifts >> 30
    fields = fields.reshape(*packed.shape[:-1], -1)[..., :columns]
    return fields.astype(jnp.int8)


def _quantize_residuals(
    rows: TokenRows,
    main: _BlockScales,
    found: _BlockScales,
    *,
    block: tuple[int, int],
) -> Term:
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

    def falls_of(found: _BlockScales) -> jax.Array:
        return found.scales > 0.0  # [T, K/k]

    def local(
        x: jax.Array,
        order: jax.Array,
        counts: jax.Array,
        main: _BlockScales,
        found: _BlockScales,
        slices: RowSlices,
        places: jax.Array,
    ) -> jax.Array:
        here = _local_rows(plan, order, counts, m)
        x = x.reshape(-1, width)[token_of(order, x)]
        residual = _residual(x, here, main, block)
        codes = _codes(residual, here, found.inverse, side)
        codes = _in_blocks(codes.astype(jnp.int8), side).reshape(-1, side)
        # The parts of rows in blocks that fall back, in their order.
        is_sent = falls_of(found).at[here.tile].get(mode="fill", fill_value=False)
        (index,) = jnp.nonzero(is_sent.reshape(-1), size=is_sent.size, fill_value=0)
        size = plan.slots * TILE * is_sent.shape[1]
        sent = to_experts(plan, codes[index], size, slices)
        received = sent.at[places[0, 0]].get(mode="fill", fill_value=0)
        return received.reshape(*places.shape[:4], -1)[..., :width]

    by_token, by_expert = plan.by_token, plan.by_expert
    specs = by_token, by_token, P(), P(), P(), P(), by_expert
    run = plan.over_devices(local, specs, by_expert)
    units = jnp.sum(falls_of(found), axis=1, dtype=jnp.int32)
    tiles = plan.tiles(m)
    places = _unit_places(tiles, units, falls_of(found), m)
    operands = plan.counts, main, found, row_slices(plan, m, units), places
    codes = run(rows.values, plan.order, *operands)
    return Term(codes, tile_scales(tiles, found.scales))


def _unit_places(
    tiles: ExpertTiles, units: jax.Array, falls: jax.Array, m: int
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
    has_rows = tiles.row_counts > 0
    first = jnp.where(has_rows, exclusive_sum(m * units)[tiles.indices], last)
    first -= jnp.min(first, axis=2, keepdims=True)
    falls = falls[tiles.indices]
    rank = jnp.cumsum(falls, axis=3, dtype=jnp.int32) - 1
    row = jnp.arange(m, dtype=jnp.int32)[None, None, None, :]
    of_row = first[..., None] + row * units[tiles.indices][..., None]
    is_sent = falls[..., None, :] & (row < tiles.row_counts[..., None])[..., None]
    return jnp.where(is_sent, of_row[..., None] + rank[..., None, :], last)
