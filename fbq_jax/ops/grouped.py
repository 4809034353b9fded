"""Ops of rows in groups, each group with its own matrix (mixture of experts).

In addition to the shapes of ``kernels.grouped_reference``, each op takes problems that
differ in their groups: D parts of the groups, which own different matrices, and in each
C copies, which have different tiles of the same groups.  The arrays of tiles have
leading axes ``[D, C]``, and those of matrices ``[D]``.  Devices that have their own
groups (``fbq_jax.core.expert_exchange``) compute one problem each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import grouped_reference
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Block, Quantized
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.ops.backends import (
    mosaic_refusal,
    tpu_refusal,
    triton_kernels,
    triton_refusal,
)
from fbq_jax.ops.op import Kernel, LocalOp
from fbq_jax.ops.products import BlockShape
from fbq_jax.ops.quantization import fallback_words, seed_words, wanted_layouts
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
    columns, lead = block_axis("j", x.values.shape[-1], block[1]), _lead(x.first_rows)
    words: Any = GroupedRows
    rows = words(f"{lead}{UNSHARDED} {columns.codes}", f"{lead}t", f"{lead}t")
    return rows, layout_words(UNSHARDED_AXIS, columns, f"{lead}t")


def _lead(tiles: jax.Array) -> str:
    """The words of the leading axes of tiles, given an array with a value per tile."""
    return "d c " if tiles.ndim == 3 else ""


def _map_problems(
    function: Callable[..., Any], tiles: tuple[Any, ...], shared: Any = None
) -> Any:
    """Calls a function on each problem.

    Args:
      function: takes the tiles and the matrices of one problem.
      tiles: trees of arrays; the last one has a value per tile.
      shared: a tree of arrays with one leading axis, the matrices of each part.
    """
    if tiles[-1].ndim == 1:
        return function(*tiles, shared)
    parts, copies = tiles[-1].shape[:2]

    def call(index: jax.Array | int, *tiles: Any) -> Any:
        return function(*tiles, jax.tree.map(lambda x: x[index], shared))

    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tiles)
    if parts == copies == 1:
        out = call(0, *jax.tree.map(lambda x: x[0], merged))
        return jax.tree.map(lambda x: x[None, None], out)
    index = jnp.arange(parts * copies, dtype=jnp.int32) // copies
    out = lax.map(lambda args: call(*args), (index, *merged))
    return jax.tree.map(lambda x: x.reshape(parts, copies, *x.shape[1:]), out)


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
    return ShardingRule((rows, seed_words(seeds, rows.row_counts)), results)


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
    tile = rows.row_counts
    return ShardingRule((rows, tile, seed_words(seeds, tile)), results)


def _round_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Quantizes this device's tiles and columns, with the noise at their offset."""
    x, *others = operands
    offset = shard.global_offset(1, options["block"][0], x.values.shape[-1])

    def quantize(*operands: Any) -> Any:
        values, *others, first_rows, row_counts, _ = operands
        x = GroupedRows(values, first_rows, row_counts)
        return run(x, *others, **options, global_offset=offset)

    return _map_problems(quantize, (x.values, *others, x.first_rows, x.row_counts))


def _matmul_rule(
    _lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: BlockShape,
    **_options: Any,
) -> ShardingRule:
    _, k, n = block_shape
    columns = block_axis("n", rhs.codes.shape[-2], n)
    depth, lead = block_axis("k", rhs.codes.shape[-1], k), _lead(groups)
    left, _ = layout_words(UNSHARDED_AXIS, depth, f"{lead}t")
    right, _ = layout_words(columns, depth, f"{lead[:2]}e")
    if rhs.sums is not None:
        right = right._replace(sums=right.scales)
    operands = left, None if residual is None else left, right, f"{lead}t"
    contracted = f"{depth.codes[0].strip(UNSHARDED)}e"
    return ShardingRule(operands, f"{lead}t . {columns.codes}", contracted)


def _contraction_rule(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: BlockShape,
    **_options: Any,
) -> ShardingRule:
    k, _, n = block_shape
    rows, lead = block_axis("k", lhs.codes.shape[-2], k), _lead(groups)
    columns = block_axis("n", rhs.codes.shape[-2], n)
    left, _ = layout_words(rows, UNSHARDED_AXIS, f"{lead}t")
    right, _ = layout_words(columns, UNSHARDED_AXIS, f"{lead}t")
    if rhs.sums is not None:
        right = right._replace(sums=right.scales)
    result = f"{lead[:2]}e {rows.codes} {columns.codes}"
    return ShardingRule((left, right, f"{lead}t"), result, f"{lead[2:3]}t")


def _matmul_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Multiplies the tiles of this device's groups; other tiles give zeros."""
    lhs, residual, rhs, groups = operands
    size = rhs.codes.shape[-3]
    groups = _local_groups(groups, size, shard)

    def multiply(
        lhs: Quantized, residual: Quantized | None, groups: jax.Array, rhs: Quantized
    ) -> jax.Array:
        return run(lhs, residual, rhs, groups, **options)

    part = _map_problems(multiply, (lhs, residual, groups), rhs)
    if shard.assignment.axes_of("e"):
        is_local = (groups >= 0) & (groups < size)
        part = jnp.where(is_local[..., None, None], part, jnp.zeros_like(part))
    return collectives.sum_in_float(part, shard)


def _contraction_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Sums the products of this device's tiles, for this device's groups."""
    *_, groups = operands
    size = options["size"] // shard.assignment.shard_count("e")
    groups = _local_groups(groups, size, shard)

    def contract(*operands: Any) -> jax.Array:
        return run(*operands[:-1], **options | {"size": size})

    part = _map_problems(contract, (*operands[:2], groups))
    if groups.ndim == 3:  # the copies of a part have the same groups
        part = jnp.sum(part, axis=1)
    return collectives.sum_in_float(part, shard)


def _local_groups(groups: jax.Array, size: int, shard: Shard) -> jax.Array:
    """Group indices relative to the first of the ``size`` groups on this device."""
    index = shard.assignment.shard_index("e").astype(jnp.int32)
    return groups - jnp.int32(size) * index


_TPU_KERNEL = {"tpu": Kernel("tpu", "fbq_jax.kernels.tpu.grouped", tpu_refusal)}


_GEMM_KERNELS = {
    name: Kernel(name, f"fbq_jax.kernels.{name}.grouped_gemm", refusal)
    for name, refusal in (("mosaic", mosaic_refusal), ("triton", triton_refusal))
} | _TPU_KERNEL
_QUANTIZE_KERNELS = triton_kernels("fbq_jax.kernels.triton.quantize") | _TPU_KERNEL
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
    kernels=_GEMM_KERNELS,
)
ragged_contraction = define_op(
    grouped_reference.ragged_contraction,
    _contraction_rule,
    _contraction_on_shard,
    stacks=False,
    kernels=_GEMM_KERNELS,
)
