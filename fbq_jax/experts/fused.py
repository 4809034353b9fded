"""The two projections of a mixture's experts, fused with the gate between them.

    y = (silu(gate) * up) . W_down        where [gate, up] = x . W_gate_up

Between the projections, rows stay in the tiles of their experts, and tiles without rows
take no time.  The sources of ``fbq_jax.kernels.sources`` read the output of the first
projection and the gradient of the second's input, so the gate's output and the gradient
of gate and up exist in memory only as INT8 values.

The results equal ``fbq_jax.ragged_dot`` and ``fbq_jax.nonlinear``, except that a
bfloat16 or float16 gate is rounded once instead of twice.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax

from fbq_jax.core import fused_layers, gemms, nonlinear, threshold
from fbq_jax.core.dimension_numbers import output_dtype
from fbq_jax.core.dot_general import LayerDot
from fbq_jax.core.gemms import SavedMatmul
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.experts.exchange import ExchangedGroups
from fbq_jax.experts.ragged_dot import (
    Groups,
    check_automatic,
    make_rows,
    sow_rates,
)
from fbq_jax.experts.rows import ExchangedRows, TiledRows
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.sharding.manual_axes import as_varying

# Of the gate and up projections, and of the down projection.
ExpertRows = tuple[TiledRows, TiledRows] | tuple[ExchangedRows, ExchangedRows]
Weights = tuple[tuple[jax.Array | None, ...], tuple[Layouts | None, ...]]


def can_fuse(gate_up: LayerDot, down: LayerDot, groups: Groups) -> bool:
    """Whether two projections can be fused.

    They need a common recipe with scales per block that ``fused_layers.fuses`` accepts.
    Where devices exchange rows, all mesh axes must shard tokens.  Another axis may
    shard the columns of ``gate_up``, as tensor parallelism does, and such a shard has
    no matching parts of the gate and of up.
    """
    if isinstance(groups, ExchangedGroups) and groups.plan.has_other_axes:
        return False
    recipe = gate_up.config.recipe
    common = gate_up.config == down.config
    return common and recipe.in_blocks and fused_layers.fuses(recipe)


def fused_experts(
    gate_up: LayerDot,
    down: LayerDot,
    x: jax.Array,
    groups: tuple[Groups, Groups],
    *,
    bits: int,
) -> jax.Array:
    """Computes both projections and the gate, and updates the state of both layers.

    Args:
      gate_up: the first projection, ``[E, D, 2 F]``; up follows the gate.
      down: the second one, ``[E, F, D]``, which ``can_fuse`` accepts.
      x: rows ``[M, D]`` in groups; or tokens ``[T, D]`` whose rows are sent.
      groups: of the rows of each projection.
      bits: bits per value that the gate saves for the backward pass, 4 to 12.

    Returns:
      ``[M, D]``, or ``[T, k, D]`` for rows that are sent, in the dtype of x.

    Raises:
      TypeError: as ``fbq_jax.ragged_dot``.
      ValueError: as ``fbq_jax.ragged_dot``, or ``bits`` is out of range.
    """
    config, layers = gate_up.config, (gate_up, down)
    rows = _rows(gate_up, down, x, groups)
    nonlinear.check_bits(bits)
    dtype = output_dtype(x, gate_up.weight, None, None)
    spec = Spec(config.recipe, dtype, dtype, dtype, config.implementation)
    weights = tuple(map(_weight, layers)), tuple(layer.codes for layer in layers)
    x, weights, rows = as_varying((x, weights, rows))
    states = [threshold.canonicalize_state(layer.state) for layer in layers]
    scalars = tuple(threshold.scalars_of(state).on_device(x) for state in states)
    with gate_up.named():
        y, stats = _experts(spec, bits, x, weights, scalars, rows)
    tile_groups = [of_layer.tile_groups for of_layer in rows]
    for layer, state, layer_stats, tiles in zip(
        layers, states, stats, tile_groups, strict=True
    ):
        sow_rates(layer, layer_stats, tiles)
        y = layer.commit(y, threshold.next_state(state, layer_stats))
    return y


def _rows(
    gate_up: LayerDot, down: LayerDot, x: jax.Array, groups: tuple[Groups, Groups]
) -> ExpertRows:
    """How the rows of each projection lie."""
    rows = make_rows(gate_up.config, x, gate_up.weight, groups[0])
    if isinstance(rows, ExchangedRows):
        assert isinstance(groups[1], ExchangedGroups)
        return rows, dataclasses.replace(rows, groups=groups[1])
    check_automatic(down.weight)
    replace = functools.partial(dataclasses.replace, rows)
    return replace(out_in_tiles=True), replace(lhs_in_tiles=True)


def _weight(layer: LayerDot) -> jax.Array | None:
    """The weight of a layer; None if it is frozen."""
    if layer.is_frozen:
        return None
    with layer.named():
        return layer.config.mark(layer.weight, None)[0]


class _Saved(NamedTuple):
    """The residuals of both projections and of the gate between them."""

    gate_up: SavedMatmul | None
    gate: Packed
    down: SavedMatmul | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(
    spec: Spec,
    bits: int,
    x: jax.Array,
    weights: Weights,
    scalars: tuple[Scalars, ...],
    rows: ExpertRows,
) -> tuple[jax.Array, tuple[Stats, ...]]:
    """The output of the experts, and the stats of each projection."""
    return _experts_fwd(spec, bits, x, weights, scalars, rows, save=False)[0]


def _experts_fwd(
    spec: Spec,
    bits: int,
    x: jax.Array,
    weights: Weights,
    scalars: tuple[Scalars, ...],
    rows: ExpertRows,
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, tuple[Stats, ...]], _Saved]:
    (w, w_down), (codes, codes_down) = weights
    (y, stats), saved = gemms.matmul_fwd(
        spec, x, w, scalars[0], codes, rows[0], save=save
    )
    y, down_stats, factors, saved_down = fused_layers.multiply_gated(
        spec,
        y,
        w_down,
        codes_down,
        scalars[1],
        rows[1],
        bits=bits,
        interleaved=False,
        save=save,
    )
    return (y, (stats, down_stats)), _Saved(saved, factors, saved_down)


def _experts_bwd(
    spec: Spec,
    bits: int,
    saved: _Saved,
    cotangents: tuple[jax.Array, tuple[Stats, ...]],
) -> tuple[jax.Array, tuple[tuple[jax.Array | None, ...], None], None, None]:
    dy, _ = cotangents
    assert saved.gate_up is not None
    assert saved.down is not None
    grad, dw_down = fused_layers.gated_bwd(
        spec, saved.gate_up, saved.gate, saved.down, dy, bits=bits, interleaved=False
    )
    dx, dw = gemms.backward(spec, saved.gate_up, grad)
    return dx, ((dw, dw_down), None), None, None


_experts.defvjp(_experts_fwd, _experts_bwd)
