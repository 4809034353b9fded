"""Sums a product over the devices that share its contraction.

In floating point, XLA's own collectives compute the sum.  In INT8, which is meant for
gradients, each device quantizes its partial sum in blocks with stochastic rounding and
divides it into one share per device.  It sends the codes and scales of each share to
the share's device, which adds the received shares in float32.  This costs one byte per
value and four bytes per block.  Noise differs between devices, and between mesh axes
that are summed one after the other, so the sum is unbiased.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.quantized import Quantized
from fbq_jax.kernels.rounding import fold
from fbq_jax.sharding.assignment import MeshAxes, ShardAssignment
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import factor_names

BLOCK = (128, 128)
# The dtype of a device's partial sum for each value of ``Gemm.reduce``.
PARTIAL_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.float32}


def sum_in_float(part: jax.Array, shard: Shard) -> jax.Array:
    """Sums partial products; each device gets its shard of the result.

    Args:
      part: this device's partial sum, in the dtype of the sum.
      shard: this device's share of the product.
    """
    scatter = functools.partial(lax.psum_scatter, tiled=True)
    part, left = _reduce_scatter(part, shard, scatter)
    return lax.psum(part, left) if left else part


def sum_in_int8(
    part: jax.Array,
    shard: Shard,
    *,
    seeds: jax.Array,
    quantize: Callable[[jax.Array, jax.Array], Quantized],
    dtype: Any,
) -> jax.Array:
    """Sums partial products, which devices exchange as INT8 codes.

    If the result is not sharded, its shares are gathered.

    Args:
      part: this device's partial sum, float32 ``[B, M, N]``.
      shard: this device's share of the product.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      quantize: quantizes matrices, given their seeds, stochastically.
      dtype: the dtype of the result, in which shares are gathered.
    """
    assignment = shard.assignment
    if not (summed := assignment.axes_of(shard.rule.contracted)):
        return part
    seed = fold(seeds[0], lax.axis_index(summed))
    scatter = functools.partial(_scatter_codes, seed, quantize, assignment)
    part, left = _reduce_scatter(part, shard, scatter)
    if not left:
        return part
    rows = part.shape[1]
    padding = -rows % assignment.device_count(left)
    part = jnp.pad(part, ((0, 0), (0, padding), (0, 0)))
    share = scatter(part, left, scatter_dimension=1).astype(dtype)
    return lax.all_gather(share, left, axis=1, tiled=True)[:, :rows]


def _reduce_scatter(
    part: jax.Array, shard: Shard, scatter: Callable[..., jax.Array]
) -> tuple[jax.Array, MeshAxes]:
    """Sums over the axes that shard the result; also returns the remaining axes."""
    left = set(shard.assignment.axes_of(shard.rule.contracted))
    for axis, factor in enumerate(factor_names(shard.rule.results)):
        if names := shard.assignment.reduce_scatter_axes.get(factor):
            part = scatter(part, names, scatter_dimension=axis)
            left.difference_update(names)
    return part, tuple(sorted(left))


def _scatter_codes(
    seed: jax.Array,
    quantize: Callable[[jax.Array, jax.Array], Quantized],
    assignment: ShardAssignment,
    part: jax.Array,
    names: MeshAxes,
    *,
    scatter_dimension: int,
) -> jax.Array:
    """``lax.psum_scatter`` in INT8; ``seed`` differs between devices."""
    axis, shape, number = scatter_dimension, part.shape, assignment.device_count(names)
    split = (*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])
    shares = jnp.moveaxis(part.reshape(split), axis, 0)  # [number, b, ., .]
    matrices = shares.reshape(-1, *shares.shape[2:])
    # Each mesh axis is summed over once, so its index identifies this sum.
    stage = tuple(assignment.mesh_shape).index(names[0])
    seeds = fold(fold(seed, stage), jnp.arange(len(matrices)))
    codes = quantize(matrices, seeds)

    def exchange(x: jax.Array) -> jax.Array:
        x = x.reshape(number, -1, *x.shape[1:])
        return lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True)

    received = jax.tree.map(exchange, codes)  # [number, b, ., .]
    return jnp.sum(received.dequantize(), axis=0)
