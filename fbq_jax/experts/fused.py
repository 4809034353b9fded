"""The two projections of a mixture's experts, fused with the gate between them.

    y = (silu(gate) * up) . W_down        where [gate, up] = x . W_gate_up

Between the projections, rows stay in the tiles of their experts, and tiles without rows
take no time.  The sources of ``fbq_jax.kernels.layer_sources`` read the output of the
first projection and the gradient of the second's input, so the gate's output and the
gradient of gate and up exist in memory only as INT8 values.

The results equal ``fbq_jax.ragged_dot`` and ``fbq_jax.nonlinear``, except that a
bfloat16 or float16 gate is rounded once instead of twice.
"""

import jax

from fbq_jax.core import fused_layers, nonlinear, threshold
from fbq_jax.core.arguments import output_dtype
from fbq_jax.core.dot_general import LayerDot
from fbq_jax.core.fused_layers import FusedSpec
from fbq_jax.core.gemms import Spec
from fbq_jax.core.nonlinear import NormSpec
from fbq_jax.experts.plan import Exchange
from fbq_jax.experts.ragged_dot import (
    Groups,
    check_automatic,
    make_rows,
    sow_rates,
)
from fbq_jax.sharding.mesh_axes import as_varying


def can_fuse(gate_up: LayerDot, down: LayerDot, groups: Groups) -> bool:
    """Whether two projections can be fused.

    They need a common recipe that ``fused_layers.fuses`` accepts.
    Where devices exchange rows, all mesh axes must shard tokens.  Another axis may
    shard the columns of ``gate_up``, as tensor parallelism does, and such a shard has
    no matching parts of the gate and of up.
    """
    if isinstance(groups, Exchange) and groups.has_other_axes:
        return False
    has_one_config = gate_up.config == down.config
    return has_one_config and fused_layers.fuses(gate_up.config.recipe)


def fused_experts(
    gate_up: LayerDot,
    down: LayerDot,
    x: jax.Array,
    groups: Groups,
    *,
    bits: int,
) -> jax.Array:
    """Computes both projections and the gate, and updates the state of both layers.

    Args:
      gate_up: the first projection, ``[E, D, 2 F]``; up follows the gate.
      down: the second one, ``[E, F, D]``, which ``can_fuse`` accepts.
      x: rows ``[M, D]`` in groups; or tokens ``[T, D]`` whose rows are sent.
      groups: of the rows of the first projection.
      bits: bits per value that the gate saves for the backward pass, 4 to 12.

    Returns:
      ``[M, D]``, or ``[T, k, D]`` for rows that are sent, in the dtype of x.

    Raises:
      TypeError: as ``fbq_jax.ragged_dot``.
      ValueError: as ``fbq_jax.ragged_dot``, or ``bits`` is out of range.
    """
    config, layers = gate_up.config, (gate_up, down)
    rows = make_rows(config, x, gate_up.weight, groups).fused()
    if not isinstance(groups, Exchange):
        check_automatic(down.weight)
    nonlinear.check_bits(bits)
    dtype = output_dtype(x, gate_up.weight, None, None)
    gemm = Spec(config.recipe, dtype, dtype, dtype, config.implementation)
    spec = FusedSpec((gemm, gemm), NormSpec(False, 0.0, bits))  # there is no norm
    weights = tuple(None if layer.is_frozen else layer.weight for layer in layers)
    codes = tuple(layer.codes for layer in layers)
    x, weights, codes, rows = as_varying((x, weights, codes, rows))
    states = [threshold.canonicalize_state(layer.state) for layer in layers]
    scalars = tuple(threshold.scalars_of(state).on_device(x) for state in states)
    with gate_up.named():
        y, stats = fused_layers.norm_mlp(spec, x, None, weights, codes, scalars, rows)
    for layer, state, layer_stats, of_layer in zip(
        layers, states, stats, rows, strict=True
    ):
        sow_rates(layer, layer_stats, of_layer.tile_groups)
        y = layer.commit(y, threshold.next_state(state, layer_stats))
    return y
