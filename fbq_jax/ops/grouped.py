"""GEMMs of groups of rows, each group with its own matrix (mixture of experts)."""

from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.kernels import grouped_reference
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops.op import LocalOp, Op, register
from fbq_jax.ops.products import BlockShape
from fbq_jax.ops.transformations import call
from fbq_jax.sharding import collectives
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    UNSHARDED_AXIS,
    ShardingRule,
    block_axis,
    layout_words,
)


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: BlockShape,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies tiles of rows ``[T, m, K]``, each with its group's ``rhs [N, K]``.

    Args:
      lhs: codes int8 ``[T, m, K]`` and scales float32 ``[T, 1, ceil(K/k)]``.
      residual: a second term of lhs, of the same shapes, or None.
      rhs: codes int8 ``[G, N, K]`` and scales float32 ``[G, ceil(N/n), ceil(K/k)]``.
      groups: int32 ``[T]``, the group of each tile.
      block_shape: ``(m, k, n)``, the size of a block along rows, K and N.
      dtype: dtype of the output.
      implementation: ``"reference"`` or None; there is no kernel.

    Returns:
      ``[T, m, N]`` in ``dtype``.
    """
    options = {"block_shape": block_shape, "dtype": jnp.dtype(dtype)}
    operands = lhs, residual, rhs, groups
    return call(RAGGED_MATMUL, operands, block_shape, options, implementation)


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: BlockShape,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """Sums the products of each group's tiles over their rows.

    Args:
      lhs: codes int8 ``[T, K, m]`` and scales float32 ``[T, ceil(K/k), 1]``.
      rhs: codes int8 ``[T, N, m]`` and scales float32 ``[T, ceil(N/n), 1]``.
      groups: int32 ``[T]``, the group of each tile.
      size: G, the number of groups.
      block_shape: ``(k, m, n)``, the size of a block along K, rows and N.
      dtype: dtype of the output.
      implementation: ``"reference"`` or None; there is no kernel.

    Returns:
      ``[G, K, N]`` in ``dtype``; zeros for a group without tiles.
    """
    options = {"size": size, "block_shape": block_shape, "dtype": jnp.dtype(dtype)}
    operands = lhs, rhs, groups
    return call(RAGGED_CONTRACTION, operands, block_shape, options, implementation)


def _matmul_rule(
    _lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *_groups: Any,
    block_shape: BlockShape,
    **_options: Any,
) -> ShardingRule:
    _, k, n = block_shape
    columns = block_axis("n", rhs.codes.shape[1], n)
    depth = block_axis("k", rhs.codes.shape[2], k)
    left, _ = layout_words(UNSHARDED_AXIS, depth, "t")
    right, _ = layout_words(columns, depth, "e")
    operands = left, None if residual is None else left, right, "t"
    contracted = f"{depth.codes[0].strip(UNSHARDED)}e"
    return ShardingRule(operands, f"t . {columns.codes}", contracted)


def _contraction_rule(
    lhs: Quantized,
    rhs: Quantized,
    *_groups: Any,
    block_shape: BlockShape,
    **_options: Any,
) -> ShardingRule:
    k, _, n = block_shape
    rows = block_axis("k", lhs.codes.shape[1], k)
    columns = block_axis("n", rhs.codes.shape[1], n)
    left, _ = layout_words(rows, UNSHARDED_AXIS, "t")
    right, _ = layout_words(columns, UNSHARDED_AXIS, "t")
    return ShardingRule((left, right, "t"), f"e {rows.codes} {columns.codes}", "t")


def _matmul_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Multiplies the tiles of this device's groups; other tiles give zeros."""
    lhs, residual, rhs, groups = operands
    groups = _local_groups(groups, len(rhs.codes), shard)
    part = run(lhs, residual, rhs, groups, **options)
    return collectives.sum_in_float(part, shard)


def _contraction_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Sums the products of this device's tiles, for this device's groups."""
    lhs, rhs, groups = operands
    size = options["size"] // shard.assignment.shard_count("e")
    groups = _local_groups(groups, size, shard)
    part = run(lhs, rhs, groups, **options | {"size": size})
    return collectives.sum_in_float(part, shard)


def _local_groups(groups: jax.Array, size: int, shard: Shard) -> jax.Array:
    """Group indices relative to the first of the ``size`` groups on this device."""
    index = shard.assignment.shard_index("e").astype(jnp.int32)
    return groups - jnp.int32(size) * index


RAGGED_MATMUL = Op(
    "ragged_matmul",
    reference=grouped_reference.ragged_matmul,
    sharding_rule=_matmul_rule,
    on_shard=_matmul_on_shard,
    stacks=False,
)
RAGGED_CONTRACTION = Op(
    "ragged_contraction",
    reference=grouped_reference.ragged_contraction,
    sharding_rule=_contraction_rule,
    on_shard=_contraction_on_shard,
    stacks=False,
)
register(RAGGED_MATMUL, RAGGED_CONTRACTION)
