"""The two projections of a mixture's experts, fused with the gate between them.

    y = (silu(gate) * up) . W_down        where [gate, up] = x . W_gate_up

Between the projections, rows stay in the tiles of their experts, and tiles without rows
take no time.  The fused quantization ops of ``fbq_jax.kernels.fused_reference`` read
the output of the first projection and the gradient of the second's input, so the gate's
output and the gradient of gate and up exist in memory only as INT8 values.

The results equal those of ``fbq_jax.core.ragged_dot`` and ``fbq_jax.nonlinear``, except
that a bfloat16 or float16 gate is rounded once instead of twice.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax

from fbq_jax.core import fused_layers, matmul_vjp, nonlinear, threshold
from fbq_jax.core.dimension_numbers import output_dtype
from fbq_jax.core.expert_exchange import ExchangedGroups
from fbq_jax.core.grouped_gemms import ExchangedGemms, GroupedGemms
from fbq_jax.core.grouped_projection import GroupedProjection
from fbq_jax.core.matmul_vjp import SavedMatmul
from fbq_jax.core.ragged_dot import check_automatic, group_rates, make_gemms
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Quantized
from fbq_jax.sharding.manual_axes import as_varying

# Those of the gate and up projections, and those of the down projection.
ExpertGemms = tuple[GroupedGemms, GroupedGemms] | tuple[ExchangedGemms, ExchangedGemms]


def can_fuse(gate_up: GroupedProjection, down: GroupedProjection) -> bool:
    """Whether two projections can be fused.

    They need a common recipe with scales per block that ``fused_layers.fuses`` accepts.
    A mesh axis besides those of experts may shard the columns of ``gate_up``, as tensor
    parallelism does, and such a shard has no matching parts of the gate and of up.
    """
    groups = gate_up.call.group_sizes
    if isinstance(groups, ExchangedGroups) and groups.plan.has_other_axes:
        return False
    recipe = gate_up.config.recipe
    common = gate_up.config == down.config
    return common and recipe.in_blocks and fused_layers.fuses(recipe)


def fused_experts(
    gate_up: GroupedProjection, down: GroupedProjection, x: jax.Array, *, bits: int
) -> jax.Array:
    """Computes both projections and the gate, and updates the state of both layers.

    Args:
      gate_up: the first projection, ``[E, D, 2 F]``; up follows the gate.
      down: the second one, ``[E, F, D]``, which ``can_fuse`` accepts.
      x: rows ``[M, D]`` in groups; or tokens ``[T, D]`` whose rows are sent.
      bits: bits per value that the gate saves for the backward pass, 4 to 12.

    Returns:
      ``[M, D]``, or ``[T, k, D]`` for rows that are sent, in the dtype of x.

    Raises:
      TypeError: as ``fbq_jax.ragged_dot``.
      ValueError: as ``fbq_jax.ragged_dot``, or ``bits`` is out of range.
    """
    config, projections = gate_up.config, (gate_up, down)
    gemms = _gemms(gate_up, down, x)
    nonlinear.check_bits(bits)
    dtype = output_dtype(x, gate_up.weight, *gate_up.call[1:])
    spec = Spec(config.recipe, dtype, dtype, dtype, config.implementation)
    weights = tuple(map(_weight, projections))
    x, weights, gemms = as_varying((x, weights, gemms))
    states = [threshold.canonicalize_state(layer.state) for layer in projections]
    scalars = tuple(threshold.scalars_of(state).on_device(x) for state in states)
    tile_groups = [each.tile_groups() for each in gemms]
    with gate_up.named():
        y, stats = _experts(spec, bits, x, weights, scalars, gemms)
    layers = zip(projections, states, stats, tile_groups, strict=True)
    for layer, state, layer_stats, groups in layers:
        new = threshold.next_state(state, layer_stats)
        y = layer.commit(y, new, group_rates(layer_stats, groups, len(layer.weight)))
    return y


def _gemms(
    gate_up: GroupedProjection, down: GroupedProjection, x: jax.Array
) -> ExpertGemms:
    """What runs the GEMMs of each projection."""
    gemms = make_gemms(gate_up.config, x, gate_up.weight, gate_up.call.group_sizes)
    if isinstance(gemms, ExchangedGemms):
        groups = down.call.group_sizes
        assert isinstance(groups, ExchangedGroups)
        return gemms, dataclasses.replace(gemms, groups=groups)
    check_automatic(down.weight)
    replace = functools.partial(dataclasses.replace, gemms)
    return replace(out_in_tiles=True), replace(lhs_in_tiles=True)


def _weight(layer: GroupedProjection) -> jax.Array | Quantized:
    """The weight of a layer; the colwise codes of a frozen one."""
    if layer.codes is not None:
        return layer.codes.main
    with layer.named():
        return layer.config.marked(layer.weight, layer.call)[0]


class _Saved(NamedTuple):
    """The residuals of both projections and of the gate between them."""

    gate_up: SavedMatmul | None
    gate: tuple[Packed, Packed]
    down: SavedMatmul | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(
    spec: Spec,
    bits: int,
    x: jax.Array,
    weights: tuple[jax.Array | Quantized, ...],
    scalars: tuple[Scalars, ...],
    gemms: ExpertGemms,
) -> tuple[jax.Array, tuple[Stats, ...]]:
    """The output of the experts, and the stats of each projection."""
    return _experts_fwd(spec, bits, x, weights, scalars, gemms, save=False)[0]


def _experts_fwd(
    spec: Spec,
    bits: int,
    x: jax.Array,
    weights: tuple[jax.Array | Quantized, ...],
    scalars: tuple[Scalars, ...],
    gemms: ExpertGemms,
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, tuple[Stats, ...]], _Saved]:
    (y, stats), saved = matmul_vjp.matmul_fwd(
        spec, x, weights[0], scalars[0], gemms[0], save=save
    )
    y, down_stats, factors, saved_down = fused_layers.multiply_gated(
        spec,
        y,
        weights[1],
        scalars[1],
        gemms[1],
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
) -> tuple[jax.Array, tuple[jax.Array | None, ...], None, None]:
    dy, _ = cotangents
    assert saved.gate_up is not None
    assert saved.down is not None
    grad, dw_down = fused_layers.gated_bwd(
        spec, saved.gate_up, saved.gate, saved.down, dy, bits=bits, interleaved=False
    )
    dx, dw = matmul_vjp.backward(spec, saved.gate_up, grad)
    return dx, (dw, dw_down), None, None


_experts.defvjp(_experts_fwd, _experts_bwd)
