"""Sums a product over the devices that share its contraction.

In floating point XLA's own collectives sum.  In INT8, which is for gradients, each
device quantizes its partial sum in blocks with stochastic rounding and keeps one share
of it.  It sends the codes and scales of the other shares to the other devices.  Each
device then adds the shares it receives in float32.  So a value costs one byte, and a
block four more.  The devices draw different noise, and again for each axis of the mesh
that is summed over separately, so the sum is unbiased.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.reference import Block, Quantized, dequantize
from fbq_jax.kernels.rounding import fold
from fbq_jax.sharding.assignment import MeshAxes, ShardAssignment
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import factor_names

BLOCK: Block = (128, 128)
# The dtype of a device's partial sum, by ``Gemm.reduce``.
PARTIAL_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.float32}


def sum_in_float(part: jax.Array, shard: Shard) -> jax.Array:
    """Sums partial products; each device gets its shard of the result.

    Args:
      part: this device's partial sum, in the dtype to sum in.
      shard: the product's rule and mesh axes.
    """
    scatter = functools.partial(lax.psum_scatter, tiled=True)
    part, left = _reduce_scatter(part, shard, scatter)
    return lax.psum(part, left) if left else part


def sum_in_int8(
    part: jax.Array,
    shard: Shard,
    *,
    seeds: jax.Array,
    quantize: Callable[..., Any],
    dtype: Any,
) -> jax.Array:
    """Sums partial products that travel as INT8 codes.

    A result that every device holds whole is gathered from the devices' shares.

    Args:
      part: this device's partial sum, float32 ``[B, M, N]``.
      shard: the product's rule and mesh axes.
      seeds: uint32 ``[B]``, of the noise.
      quantize: has the signature of ``reference.quantize``.
      dtype: the result's, in which shares are gathered.
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
    """Sums over the axes that shard the result; also returns the axes that are left."""
    left = set(shard.assignment.axes_of(shard.rule.contracted))
    for axis, factor in enumerate(factor_names(shard.rule.results)):
        if names := shard.assignment.reduce_scatter_axes.get(factor):
            part = scatter(part, names, scatter_dimension=axis)
            left.difference_update(names)
    return part, tuple(sorted(left))


def _scatter_codes(
    seed: jax.Array,
    quantize: Callable[..., Any],
    assignment: ShardAssignment,
    part: jax.Array,
    names: MeshAxes,
    *,
    scatter_dimension: int,
) -> jax.Array:
    """``lax.psum_scatter`` in INT8; the seed is this device's."""
    axis, shape, number = scatter_dimension, part.shape, assignment.device_count(names)
    split = (*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])
    shares = jnp.moveaxis(part.reshape(split), axis, 0)  # [number, b, ., .]
    matrices = shares.reshape(-1, *shares.shape[2:])
    # Each axis of the mesh is summed over once, so its index identifies the stage.
    stage = tuple(assignment.mesh_shape).index(names[0])
    seeds = fold(fold(seed, stage), jnp.arange(len(matrices)))
    codes = quantize(
        matrices, seeds, block=BLOCK, rowwise="stochastic", colwise=None
    ).rowwise

    def exchange(x: jax.Array) -> jax.Array:
        x = x.reshape(number, -1, *x.shape[1:])
        return lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True)

    values = dequantize(Quantized(*map(exchange, codes)), BLOCK)  # [number, b, ., .]
    return jnp.sum(values, axis=0)
