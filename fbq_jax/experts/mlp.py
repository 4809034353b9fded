"""Moves tokens to their experts and back.

Tokens are sorted by expert, so that each expert's are adjacent, as ``lax.ragged_dot``
takes them.  The results return by the inverse permutation and are summed per token in
float32.  All moves are gathers in both directions: the gradient of a gather by a
permutation is a gather by its inverse, where JAX would scatter and add in the dtype of
the activations.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from fbq_jax.core import nonlinear
from fbq_jax.core.dot_general import LayerDot
from fbq_jax.experts.exchange import sum_rows
from fbq_jax.experts.expert_sharding import ExpertSharding
from fbq_jax.experts.fused import can_fuse, fused_experts
from fbq_jax.experts.plan import Exchange, plan_dispatch
from fbq_jax.experts.ragged_dot import (
    Groups,
    check_automatic,
    layer_ragged_dot,
    ragged_dot_in_float,
)
from fbq_jax.experts.routing import Routes, Routing, route


class GroupedLayer(Protocol):
    """The projection of a layer of experts, with a matrix for each expert."""

    dot_general: Any

    def projection(
        self, x: jax.Array, groups: int, size: int
    ) -> tuple[jax.Array, LayerDot | None]:
        """The weight ``[groups, size, N]`` in the dtype of x, and its dot.

        ``layer_dot_of`` makes the dot, called from this method.
        """


def tokens_of(x: jax.Array) -> jax.Array:
    """The tokens ``[T, D]`` of x; ValueError if x is sharded over explicit axes."""
    check_automatic(x)
    return x.reshape(-1, x.shape[-1])


def mixture(
    x: jax.Array,
    logits: jax.Array,
    bias: jax.Array | None,
    gate_up: GroupedLayer,
    down: GroupedLayer,
    *,
    routing: Routing,
    sharding: ExpertSharding | None,
    bits: int | None,
) -> tuple[jax.Array, Routes, jax.Array]:
    """The weighted sum of the SwiGLU MLPs of each token's experts.

        y[t] = sum_i weights[t, i] down_e(silu(gate_e(x[t])) up_e(x[t])),
        e = experts[t, i]

    Args:
      x: ``[..., D]``, T tokens.
      logits: float32 ``[T, E]``, of the router.
      bias: floats ``[E]``, which balance the experts; None for zeros.
      gate_up: maps rows ``[T k, D]`` to ``[T k, 2 F]``, the gate and up.
      down: maps rows ``[T k, F]`` to ``[T k, D]``.  If both layers allow it,
        ``fused_experts`` computes them and the gate.
      routing: the settings of the router.
      sharding: the mesh axes of experts; None if each device has all.
      bits: bits per value that the gate saves for the backward pass, 4 to 12; None
        saves floats.

    Returns:
      The output, of the shape and in the dtype of x, summed in float32; the routes of
      all tokens; and the number of dropped rows, int32 ``[]``.
    """
    if bias is not None:
        bias = jnp.asarray(bias, jnp.float32)  # may be stored in another dtype
    routes = route(routing, logits, bias)
    plan, dropped = plan_dispatch(routing, routes.experts, sharding)
    project = functools.partial(_project, gate_up, down, bits)
    tokens = x.reshape(-1, x.shape[-1])
    if isinstance(plan, Exchange):
        y = project(tokens, plan)
    else:
        rows = _take_tokens(tokens, plan.order, plan.positions)
        y = project(rows, plan.group_sizes)
        y = _take_outputs(y, plan.order, plan.positions)
    y = y.astype(jnp.float32) * routes.weights[..., None]
    return jnp.sum(y, axis=1).astype(x.dtype).reshape(x.shape), routes, dropped


def _project(
    gate_up: GroupedLayer,
    down: GroupedLayer,
    bits: int | None,
    x: jax.Array,
    groups: Groups,
) -> jax.Array:
    """Both projections of rows, and the gate; fused if both layers allow it."""
    w, first = gate_up.projection(x, len(groups), x.shape[-1])
    w_down, second = down.projection(x, len(groups), w.shape[2] // 2)
    if first and second and bits is not None and can_fuse(first, second, groups):
        return fused_experts(first, second, x, groups, bits=bits)

    if first is None:
        y = ragged_dot_in_float(gate_up.dot_general, x, w, groups)
    else:
        y = layer_ragged_dot(first, x, groups)
    hidden, back = _gate(y, bits), groups
    if isinstance(groups, Exchange):
        back = groups.back
    if second is None:
        return ragged_dot_in_float(down.dot_general, hidden, w_down, back)
    return layer_ragged_dot(second, hidden, back)


def _gate(gate_up: jax.Array, bits: int | None) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if bits is None:
        return jax.nn.silu(gate) * up
    return nonlinear.silu_gate(gate, up, bits=bits)


@jax.custom_vjp
def _take_tokens(x: jax.Array, order: jax.Array, positions: jax.Array) -> jax.Array:
    """The rows ``[T k, D]`` of tokens ``[T, D]``."""
    return x[order // positions.shape[1]]


def _take_tokens_bwd(
    positions: jax.Array, grad: jax.Array
) -> tuple[jax.Array, None, None]:
    return sum_rows(grad[positions]), None, None


_take_tokens.defvjp(
    lambda x, order, positions: (_take_tokens(x, order, positions), positions),
    _take_tokens_bwd,
)


@jax.custom_vjp
def _take_outputs(y: jax.Array, order: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows ``[T k, D]`` as the outputs ``[T, k, D]`` of each token."""
    del order
    return y[positions]


def _take_outputs_bwd(
    order: jax.Array, grad: jax.Array
) -> tuple[jax.Array, None, None]:
    return grad.reshape(-1, grad.shape[-1])[order], None, None


_take_outputs.defvjp(
    lambda y, order, positions: (_take_outputs(y, order, positions), order),
    _take_outputs_bwd,
)
