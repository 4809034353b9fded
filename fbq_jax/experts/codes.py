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

In this file, x are tokens ``[T, K]``, or one row ``[T, k, K]`` for each expert of a
token; m is the number of rows of a block and of a tile; and T the number of tiles on
one device.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fbq_jax.core import threshold
from fbq_jax.core.gemms import Plan, Spec
from fbq_jax.core.threshold import LHS_STREAM, Scalars, Stats, seeds_of
from fbq_jax.experts.exchange import row_slices, to_experts, token_of
from fbq_jax.experts.plan import Exchange, GroupTiles
from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.quantized import Layouts, Quantized, Term
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.sharding.ragged_exchange import exclusive_sum


def quantize_tokens(
    plan: Exchange, x: jax.Array, seed: rounding.CallSeed, stream: int, layouts: Plan
) -> Layouts:
    """Quantizes rows in blocks, as ``ops.quantize`` does, and sends their codes."""
    found, _ = _find_scales(plan, x, _block_of(layouts))
    return _send_codes(plan, x, seed, stream, found, layouts)


def quantize_token_activation(
    plan: Exchange,
    x: jax.Array,
    spec: Spec,
    layouts: Plan,
    scalars: Scalars,
    *,
    blocks: jax.Array,
    frozen: bool,
) -> tuple[Layouts, Stats]:
    """``quantize_activation`` of rows that are sent to their experts.

    Blocks fall back by their largest value, which devices agree on.
    """
    block = _block_of(layouts)
    if spec.recipe.criterion is None:
        stats = threshold.without_fallback(scalars, plan.tile_count(block[0]))
        seed = scalars.later_seed(stats)
        return quantize_tokens(plan, x, seed, LHS_STREAM, layouts), stats
    assert spec.recipe.criterion == "absmax"  # ragged_dot checks it
    found, amax = _find_scales(plan, x, block)
    metric = reference.metric_of("absmax", found.scales, amax=amax)[:, None, :]
    second, _ = _find_scales(plan, x, block, found)
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
    lhs = _send_codes(plan, x, scalars.call_seed, LHS_STREAM, found, layouts)
    second = second._replace(scales=scales[:, 0])
    residual = _send_residuals(plan, x, found, second, block)
    assert lhs.rowwise is not None
    main = dataclasses.replace(lhs.rowwise, residual=residual)
    return lhs._replace(rowwise=main), stats


def _block_of(layouts: Plan) -> tuple[int, int]:
    """The rows and columns of a block, the same in both layouts."""
    layout = layouts.rowwise or layouts.colwise
    assert layout is not None
    r, c = layout.block
    assert r is not None
    assert c is not None
    return r, c


class _BlockScales(NamedTuple):
    """The scales of all devices' blocks, and their inverses; float32 ``[T, K/k]``."""

    scales: jax.Array
    inverse: jax.Array


class _SortedRows(NamedTuple):
    """A device's rows, sorted by expert, and their places on one device.

    Attributes:
      x: the device's tokens, or one row for each of their experts, ``[R, K]``.
      source: int32 ``[T k / S]``, where each sorted row is in x.
      tile: int32 ``[T k / S]``, the index of each row's tile; T for a dropped row.
      row: int32 ``[T k / S]``, the row in the tile.
    """

    x: jax.Array
    source: jax.Array
    tile: jax.Array
    row: jax.Array

    def spread(self, per_block: jax.Array, side: int) -> jax.Array:
        """The value ``[T, K/k]`` of each row's block, for each of its elements."""
        rows = per_block.at[self.tile].get(mode="fill", fill_value=0)
        return jnp.repeat(rows, side, axis=1)[:, : self.x.shape[1]]

    def codes(
        self,
        x: jax.Array,
        inverse: jax.Array,
        side: int,
        seeds: jax.Array | None = None,
    ) -> jax.Array:
        """Codes of sorted rows x, in float32; seeds ``[T]`` of stochastic rounding."""
        noise = None
        if seeds is not None:
            seeds = seeds.at[self.tile].get(mode="fill", fill_value=0)
            noise = rounding.noise_of_rows(seeds, self.row, x.shape[1])
        inverse = self.spread(inverse, side)
        return reference.round_to_codes(x.astype(jnp.float32), inverse, noise)

    def residual(self, main: _BlockScales, side: int) -> jax.Array:
        """What codes with these scales leave of the sorted rows, in float32."""
        x = self.x[self.source]
        codes, scales = (
            self.codes(x, main.inverse, side),
            self.spread(main.scales, side),
        )
        return reference.residual_of(x.astype(jnp.float32), codes, scales)


def _over_rows(
    plan: Exchange,
    m: int,
    function: Callable[..., Any],
    out_specs: P,
    x: jax.Array,
    *args: Any,
) -> Any:
    """Calls ``function(plan, rows, *args)`` on each device with its ``_SortedRows``."""

    def local(plan: Exchange, x: jax.Array, *args: Any) -> Any:
        counts, order = plan.counts, plan.order
        begin, sizes = exclusive_sum(counts)[plan.device], counts[plan.device]
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        position = jnp.arange(order.size, dtype=jnp.int32)
        expert = jnp.sum(position[:, None] >= ends[None], axis=1, dtype=jnp.int32)
        is_kept = expert < len(ends)
        expert = jnp.minimum(expert, len(ends) - 1)
        row = begin[expert] + position - (ends - sizes)[expert]
        tile = plan.first_tiles(m)[expert] + row // m
        tile = jnp.where(is_kept, tile, plan.tile_count(m))
        # Without the barrier, XLA would compute tiles again for each element of a row.
        tile, row = lax.optimization_barrier((tile, row % m))
        rows = _SortedRows(x.reshape(-1, x.shape[-1]), token_of(order, x), tile, row)
        return function(plan, rows, *args)

    specs = plan.by_token, *[P()] * len(args)
    return plan.over_devices(local, specs, out_specs)(x, *args)


def _find_scales(
    plan: Exchange,
    x: jax.Array,
    block: tuple[int, int],
    main: _BlockScales | None = None,
) -> tuple[_BlockScales, jax.Array]:
    """The scales of the blocks of x, or of its residual, and their ``max |x|``.

    ``main`` are the scales of the first term, whose residual this is of.
    """
    m, side = block
    tiles = plan.tile_count(m)

    def local(
        plan: Exchange, rows: _SortedRows, main: _BlockScales | None
    ) -> jax.Array:
        if main is None:
            amax = _row_amax(rows.x.astype(jnp.float32), side)[rows.source]
        else:
            amax = _row_amax(rows.residual(main, side), side)
        bits = lax.bitcast_convert_type(amax, jnp.int32)
        largest = jnp.zeros((tiles, bits.shape[1]), jnp.int32)
        largest = largest.at[rows.tile].max(bits, mode="drop")
        return lax.pmax(largest, plan.sharding.axes)

    bits = _over_rows(plan, m, local, P(), x, main)
    amax = lax.bitcast_convert_type(bits, jnp.float32)
    return _BlockScales(*scale_and_inverse(amax)), amax


def _in_blocks(x: jax.Array, side: int) -> jax.Array:
    """Pads ``[R, C]`` and splits it into ``[R, C/c, c]``."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % side)))
    return x.reshape(len(x), -1, side)


def _row_amax(x: jax.Array, side: int) -> jax.Array:
    return find_amax(_in_blocks(x, side), 2)


def _send_codes(
    plan: Exchange,
    x: jax.Array,
    seed: rounding.CallSeed,
    stream: int,
    found: _BlockScales,
    layouts: Plan,
) -> Layouts:
    """Quantizes rows with known scales, and sends their codes.

    Returns:
      Rowwise codes ``[D, C, T, m, K]`` and colwise codes ``[D, C, T, K, m]``.
    """
    (m, side), width = _block_of(layouts), x.shape[-1]
    rowwise, colwise = layouts[:2]
    roundings = list(
        dict.fromkeys(x.rounding for x in (rowwise, colwise) if x is not None)
    )

    def local(
        plan: Exchange, rows: _SortedRows, inverse: jax.Array, seeds: jax.Array
    ) -> list[jax.Array]:
        codes = [
            rows.codes(
                rows.x[rows.source],
                inverse,
                side,
                seeds if mode == "stochastic" else None,
            )
            for mode in roundings
        ]
        sent = [codes[0].astype(jnp.int8)]
        if len(codes) > 1:
            sent.append(_pack_steps(codes[1] - codes[0]))
        slices = row_slices(plan)
        return [to_experts(plan, x, plan.slots, slices)[None, None] for x in sent]

    index = jnp.arange(plan.tile_count(m), dtype=jnp.int32)
    seeds = rounding.fold_seeds(seeds_of(seed, stream, index))
    first, *steps = _over_rows(
        plan, m, local, plan.by_expert, x, found.inverse, seeds
    )  # [D, C, R, K]
    shape = *first.shape[:2], -1, m, width
    codes = {roundings[0]: first.reshape(shape)}
    if steps:
        codes[roundings[1]] = (first + _unpack_steps(steps[0], width)).reshape(shape)
    scales = _scales_of(plan.tiles(m), found.scales)
    main = transposed = None
    if rowwise is not None:
        main = Quantized(Term(codes[rowwise.rounding], scales), None, (m, side))
    if colwise is not None:
        term = Term(codes[colwise.rounding].mT, scales.mT)
        if colwise.sums:
            term = term._replace(sums=_sums(term.codes, side))
        transposed = Quantized(term, None, (side, m))
    return Layouts(main, transposed)


def _sums(codes: jax.Array, side: int) -> jax.Array:
    """``Quantized.sums`` of colwise codes ``[D, C, T, K, m]``."""
    sums = jnp.sum(jnp.abs(codes.astype(jnp.int32)), axis=4)
    sums = jnp.pad(sums, ((0, 0),) * 3 + ((0, -sums.shape[3] % side),))
    largest = jnp.max(sums.reshape(*sums.shape[:3], -1, side), axis=4)
    return largest[..., None].astype(jnp.float32)


def _scales_of(tiles: GroupTiles, scales: jax.Array) -> jax.Array:
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


def _send_residuals(
    plan: Exchange,
    x: jax.Array,
    main: _BlockScales,
    found: _BlockScales,
    block: tuple[int, int],
) -> Term:
    """Quantizes the second term and sends the codes of blocks that have one.

    Args:
      plan: the plan.
      x: the rows.
      main: the scales of the first term.
      found: the scales of the second term; 0 in blocks without one.
      block: rows and columns of a block.

    Returns:
      Codes ``[D, C, T, m, K]``, 0 in blocks without a second term, and their scales.
    """
    m, side = block

    def local(
        plan: Exchange, rows: _SortedRows, main: _BlockScales, found: _BlockScales
    ) -> jax.Array:
        falls = found.scales > 0.0  # [T, K/k]
        units = jnp.sum(falls, axis=1, dtype=jnp.int32)
        codes = rows.codes(rows.residual(main, side), found.inverse, side)
        codes = _in_blocks(codes.astype(jnp.int8), side).reshape(-1, side)
        # The parts of rows in blocks that fall back, in their order.
        is_sent = falls.at[rows.tile].get(mode="fill", fill_value=False)
        (index,) = jnp.nonzero(is_sent.reshape(-1), size=is_sent.size, fill_value=0)
        size, slices = plan.slots * falls.shape[1], row_slices(plan, m, units)
        sent = to_experts(plan, codes[index], size, slices)
        tiles = jax.tree.map(lambda x: x[plan.part, plan.copy], plan.tiles(m))
        places = _unit_places(tiles, falls, m)
        received = sent.at[places].get(mode="fill", fill_value=0)
        return received.reshape(1, 1, *places.shape[:2], -1)[..., : x.shape[-1]]

    codes = _over_rows(plan, m, local, plan.by_expert, x, main, found)
    return Term(codes, _scales_of(plan.tiles(m), found.scales))


def _unit_places(tiles: GroupTiles, falls: jax.Array, m: int) -> jax.Array:
    """Where a device receives the residual of each part of a row.

    Args:
      tiles: the tiles of this device, ``[T']``.
      falls: bool ``[T, K/k]``, which blocks of the tiles on one device fall back.
      m: the rows of a tile.

    Returns:
      int32 ``[T', m, K/k]``; beyond the end for those without a residual.
    """
    last = jnp.iinfo(jnp.int32).max
    units = jnp.sum(falls, axis=1, dtype=jnp.int32)
    first = exclusive_sum(m * units)[tiles.indices]
    first = jnp.where(tiles.row_counts > 0, first, last)
    first -= jnp.min(first)
    falls, units = falls[tiles.indices], units[tiles.indices]
    rank = jnp.cumsum(falls, axis=1, dtype=jnp.int32) - 1
    row = jnp.arange(m, dtype=jnp.int32)[None, :]
    of_row = first[:, None] + row * units[:, None]
    is_sent = falls[:, None] & (row < tiles.row_counts[:, None])[..., None]
    return jnp.where(is_sent, of_row[..., None] + rank[:, None], last)
