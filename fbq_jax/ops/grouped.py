"""GEMMs of groups of rows, each group with its own matrix (mixture of experts)."""

from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.kernels import grouped_reference
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops.op import LocalOp
from fbq_jax.ops.products import BlockShape
from fbq_jax.ops.transformations import define_op
from fbq_jax.sharding import collectives
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    UNSHARDED_AXIS,
    ShardingRule,
    block_axis,
    layout_words,
)


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


ragged_matmul = define_op(
    grouped_reference.ragged_matmul, _matmul_rule, _matmul_on_shard, stacks=False
)
ragged_contraction = define_op(
    grouped_reference.ragged_contraction,
    _contraction_rule,
    _contraction_on_shard,
    stacks=False,
)
