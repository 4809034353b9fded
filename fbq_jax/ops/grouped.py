"""Ops of rows in groups, each group with its own matrix (mixture of experts)."""

from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.kernels import grouped_reference
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Block, Quantized
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.ops.backends import mosaic_refusal, triton_kernels, triton_refusal
from fbq_jax.ops.op import Kernel, LocalOp
from fbq_jax.ops.products import BlockShape
from fbq_jax.ops.quantization import fallback_words, wanted_layouts
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


def _rows_words(x: GroupedRows, block: Block) -> tuple[Any, Any]:
    """The words of the rows, and of the layouts of their tiles.

    Each device has all rows, of which it quantizes some tiles.
    """
    columns = block_axis("j", x.values.shape[1], block[1])
    words: Any = GroupedRows
    rows = words(f"{UNSHARDED} {columns.codes}", "t", "t")
    return rows, layout_words(UNSHARDED_AXIS, columns, "t")


def _quantize_rule(
    x: GroupedRows,
    seeds: Seeds,
    *,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
    sums: tuple[str, ...] = (),
) -> ShardingRule:
    rows, layouts = _rows_words(x, block)
    results = wanted_layouts(layouts, rowwise, colwise, sums)
    return ShardingRule((rows, _seed_words(seeds)), results)


def _fallback_rule(
    x: GroupedRows,
    _theta: jax.Array,
    seeds: Seeds,
    *,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> ShardingRule:
    rows, layouts = _rows_words(x, block)
    results = fallback_words(layouts, criterion, colwise)
    return ShardingRule((rows, "t", _seed_words(seeds)), results)


def _round_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Quantizes this device's tiles and columns, with the noise at their offset."""
    columns = operands[0].values.shape[1]
    offset = shard.global_offset(1, options["block"][0], columns)
    return run(*operands, **options, global_offset=offset)


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
    if rhs.sums is not None:
        right = right._replace(sums=right.scales)
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
    if rhs.sums is not None:
        right = right._replace(sums=right.scales)
    return ShardingRule((left, right, "t"), f"e {rows.codes} {columns.codes}", "t")


def _matmul_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Multiplies the tiles of this device's groups; other tiles give zeros."""
    lhs, residual, rhs, groups = operands
    size = len(rhs.codes)
    groups = _local_groups(groups, size, shard)
    part = run(lhs, residual, rhs, groups, **options)
    if shard.assignment.axes_of("e"):
        is_local = (groups >= 0) & (groups < size)
        part = jnp.where(is_local[:, None, None], part, jnp.zeros_like(part))
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


def _seed_words(seeds: Seeds) -> Any:
    """The words of the seeds of tiles."""
    return jax.tree.map(lambda _: "t", seeds)


def _local_groups(groups: jax.Array, size: int, shard: Shard) -> jax.Array:
    """Group indices relative to the first of the ``size`` groups on this device."""
    index = shard.assignment.shard_index("e").astype(jnp.int32)
    return groups - jnp.int32(size) * index


def _gemm_kernels() -> dict[str, Kernel]:
    refusals = {"mosaic": mosaic_refusal, "triton": triton_refusal}
    return {
        name: Kernel(name, f"fbq_jax.kernels.{name}.grouped_gemm", refusal)
        for name, refusal in refusals.items()
    }


_QUANTIZE_KERNELS = triton_kernels("fbq_jax.kernels.triton.quantize")
ragged_quantize = define_op(
    grouped_reference.ragged_quantize,
    _quantize_rule,
    _round_on_shard,
    stacks=False,
    kernels=_QUANTIZE_KERNELS,
)
ragged_quantize_fallback = define_op(
    grouped_reference.ragged_quantize_fallback,
    _fallback_rule,
    _round_on_shard,
    stacks=False,
    kernels=_QUANTIZE_KERNELS,
)
ragged_matmul = define_op(
    grouped_reference.ragged_matmul,
    _matmul_rule,
    _matmul_on_shard,
    stacks=False,
    kernels=_gemm_kernels(),
)
ragged_contraction = define_op(
    grouped_reference.ragged_contraction,
    _contraction_rule,
    _contraction_on_shard,
    stacks=False,
    kernels=_gemm_kernels(),
)
