"""Moves tokens to their experts and back.

Tokens are sorted by expert, so that each expert's are adjacent, as ``lax.ragged_dot``
takes them.  The results return by the inverse permutation and are summed per token in
float32.  All moves are gathers in both directions: the gradient of a gather by a
permutation is a gather by its inverse, where JAX would scatter and add in the dtype of
the activations.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.core import nonlinear
from fbq_jax.core.dot_general import LayerDot
from fbq_jax.experts.exchange import ExchangedGroups, sum_rows
from fbq_jax.experts.fused import can_fuse, fused_experts
from fbq_jax.experts.plan import Exchange, ExpertSharding, exchange_plan
from fbq_jax.experts.ragged_dot import (
    Groups,
    layer_ragged_dot,
    ragged_dot_in_float,
)
from fbq_jax.experts.routing import Routes, Routing, count_tokens
from fbq_jax.sharding.ragged_exchange import exclusive_sum


class GroupedLayer(Protocol):
    """The projection of a layer of experts, with a matrix for each expert."""

    dot_general: Any

    def projection(
        self, x: jax.Array, groups: int, size: int
    ) -> tuple[jax.Array, LayerDot | None]:
        """The weight ``[groups, size, N]`` in the dtype of x, and its dot.

        ``layer_dot_of`` makes the dot, called from this method.
        """


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
    exchange = exchange_plan(sharding, experts, number, capacity, dispatch)
    kept = jnp.sum(exchange.group_sizes, dtype=jnp.int32)
    return exchange, experts.size - kept


def _sort(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stable order of keys, and the position of each key in it."""
    index = jnp.arange(keys.size, dtype=jnp.int32)
    _, order = lax.sort_key_val(keys, index)
    return order, jnp.zeros_like(order).at[order].set(index, unique_indices=True)


def expert_mlp(
    x: jax.Array,
    routes: Routes,
    plan: Dispatch | Exchange,
    gate_up: GroupedLayer,
    down: GroupedLayer,
    *,
    bits: int | None,
) -> jax.Array:
    """The weighted sum of the SwiGLU MLPs of each token's experts.

        y[t] = sum_i weights[t, i] down_e(silu(gate_e(x[t])) up_e(x[t])),
        e = experts[t, i]

    Args:
      x: ``[T, D]``, the tokens.
      routes: the experts and weights of each token.
      plan: the result of ``plan_dispatch``.
      gate_up: maps rows ``[T k, D]`` to ``[T k, 2 F]``, the gate and up.
      down: maps rows ``[T k, F]`` to ``[T k, D]``.  If both layers allow it,
        ``fused_experts`` computes them and the gate.
      bits: bits per value that the gate saves for the backward pass, 4 to 12; None
        saves floats.

    Returns:
      ``[T, D]`` in the dtype of x; summed in float32.
    """
    project = functools.partial(_project, gate_up, down, bits)
    if isinstance(plan, Exchange):
        sent, returned = (ExchangedGroups(plan, sends) for sends in (True, False))
        y = project(x, sent, returned)
    else:
        rows = _take_tokens(x, plan.order, plan.positions)
        y = project(rows, plan.group_sizes, plan.group_sizes)
        y = _take_outputs(y, plan.order, plan.positions)
    y = y.astype(jnp.float32) * routes.weights[..., None]
    return jnp.sum(y, axis=1).astype(x.dtype)


def _project(
    gate_up: GroupedLayer,
    down: GroupedLayer,
    bits: int | None,
    x: jax.Array,
    groups: Groups,
    hidden_groups: Groups,
) -> jax.Array:
    """Both projections of rows, and the gate; fused if both layers allow it."""
    w, first = gate_up.projection(x, len(groups), x.shape[-1])
    w_down, second = down.projection(x, len(groups), w.shape[2] // 2)
    if first and second and bits is not None and can_fuse(first, second, groups):
        return fused_experts(first, second, x, (groups, hidden_groups), bits=bits)

    if first is None:
        y = ragged_dot_in_float(gate_up.dot_general, x, w, groups)
    else:
        y = layer_ragged_dot(first, x, groups)
    hidden = _gate(y, bits)
    if second is None:
        return ragged_dot_in_float(down.dot_general, hidden, w_down, hidden_groups)
    return layer_ragged_dot(second, hidden, hidden_groups)


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
