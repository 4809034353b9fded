"""The ops that quantize matrices.

In addition to the shapes of ``kernels.reference``, each op takes matrices
``[B, G, R, C]`` with ``G * R`` rows, whose colwise codes are ``[B, C, G, R]``.
``quantize_vectors`` also takes ``[B, P, R, C]`` with seeds ``[B, P]``.  Then each of
the P parts of a matrix has its own scales and noise, and colwise codes are
``[B, P, C, R]``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import (
    AmaxReduce,
    Block,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.rounding import Rounding, Seeds, fold_seeds
from fbq_jax.ops.backends import (
    float8_refusal,
    nvidia_refusal,
    tpu_refusal,
    triton_kernels,
)
from fbq_jax.ops.op import Kernel, LocalOp
from fbq_jax.ops.transformations import define_op
from fbq_jax.sharding.assignment import ShardAssignment
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    AxisWords,
    ShardingRule,
    block_axis,
    layout_words,
    row_axes,
)
from fbq_jax.sharding.split_block_scales import quantize_split_blocks

# The granularity of operands without blocks: the rows of a kernel's tile, and the
# columns that a thread stores at once.
VECTOR_GRANULARITY = (64, 16)


def block_layouts(shape: tuple[int, ...], block: Block) -> Any:
    """The words of the codes and scales of matrices, rowwise and colwise."""
    return layout_words(row_axes(shape, block[0]), block_axis("j", shape[-1], block[1]))


def seed_words(seeds: Seeds, stack: str = "b") -> Any:
    """The words of the seeds of a stack."""
    return jax.tree.map(lambda _: stack, seeds)


def wanted_layouts(
    words: Any, rowwise: str | None, colwise: str | None, sums: tuple[str, ...] = ()
) -> Layouts:
    """The words of the layouts that have a rounding, and of their sums if wanted."""

    def layout(name: str, words: Any) -> Any:
        return words._replace(sums=words.scales) if name in sums else words

    return Layouts(
        layout("rowwise", words[0]) if rowwise else None,
        layout("colwise", words[1]) if colwise else None,
    )


def fallback_words(words: Any, criterion: str | None, colwise: str | None) -> Any:
    """The words of the results of ``quantize_fallback``, given those of layouts."""
    main, transposed = wanted_layouts(words, "nearest", colwise)
    results: Any = FallbackQuantized
    if criterion is None:
        stack = words[0].scales.split()[0]
        return results(main, None, f"{stack} . .", transposed)
    return results(main, main, words[0].scales, transposed)


def round_on_shard(
    run: Callable[..., Any],
    shard: Shard,
    operands: tuple[Any, ...],
    options: dict[str, Any],
    *,
    columns_of: Callable[[int], int] = lambda width: width,
) -> Any:
    """Runs an op that rounds, with the noise at the shard's offset.

    Args:
      run: the op on one device.
      shard: this device's share of the op.
      operands: the operands of the op; the first has the rows of the rounded matrix.
      options: the options of the op.
      columns_of: maps the first operand's columns to those of the rounded matrix.
    """
    x = operands[0]
    groups = x.shape[1] if "g" in shard.rule.operands[0] else 1
    offset = shard.global_offset(groups, x.shape[-2], columns_of(x.shape[-1]))
    return shard.run(run, operands, **options, global_offset=offset)


def _quantize_rule(
    x: jax.Array,
    seeds: Seeds,
    *,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
    sums: tuple[str, ...] = (),
    **_options: Any,
) -> ShardingRule:
    layouts = block_layouts(x.shape, block)
    results = wanted_layouts(layouts, rowwise, colwise, sums)
    splittable = "ij" if x.ndim == 3 else "j"
    operands = layouts[0].codes, seed_words(seeds)
    return ShardingRule(operands, results, splittable=splittable)


def _quantize_on_shard(
    quantize_split: Callable[..., Layouts],
    run: LocalOp,
    shard: Shard,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Layouts:
    """Quantizes a shard, by ``quantize_split`` if it may end inside a block."""
    if not shard.assignment.intra_block_axes:
        return round_on_shard(run, shard, operands, options)
    split = functools.partial(quantize_split, shard.assignment)
    return round_on_shard(split, shard, operands, options)


def row_block_layouts(
    rows: AxisWords, columns: AxisWords, *, colwise_in_blocks: bool
) -> Any:
    """The words of both layouts with one scale per row or per column of a block.

    ``rows`` and ``columns`` are the words of codes and of scales per block.
    """
    # A side of a block that has one scale is sharded like codes.
    main, _ = layout_words(AxisWords(rows.codes, rows.codes), columns)
    of_columns = AxisWords(columns.codes, columns.codes)
    _, transposed = layout_words(rows, columns if colwise_in_blocks else of_columns)
    return main, transposed


def _row_blocks_rule(
    x: jax.Array,
    seeds: Seeds,
    *,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
    colwise_in_blocks: bool = False,
    sums: tuple[str, ...] = (),
    **_options: Any,
) -> ShardingRule:
    rows = row_axes(x.shape, block[0] if colwise else 1)
    has_blocks = rowwise or colwise_in_blocks
    columns = block_axis("j", x.shape[-1], block[1] if has_blocks else 1)
    words = row_block_layouts(rows, columns, colwise_in_blocks=colwise_in_blocks)
    results = wanted_layouts(words, rowwise, colwise, sums)
    splittable = "ij" if x.ndim == 3 else "j"
    operands = words[0].codes, seed_words(seeds)
    return ShardingRule(operands, results, splittable=splittable)


def _quantize_split_row_blocks(
    assignment: ShardAssignment,
    x: jax.Array,
    seeds: Seeds,
    *,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    colwise_in_blocks: bool = False,
    sums: tuple[str, ...] = (),
    **options: Any,
) -> Layouts:
    """Quantizes a shard that may end inside a block, with blocks of single rows."""

    def layouts(
        words: str,
        block: Block,
        rowwise: Rounding | None,
        colwise: Rounding | None,
        sums: tuple[str, ...] = (),
    ) -> Layouts:
        axes = assignment.intra_block_axes
        across = {word: axes[word] for word in words if word in axes}
        return quantize_split_blocks(
            assignment._replace(intra_block_axes=across),
            x,
            fold_seeds(seeds),
            block=block,
            rowwise=rowwise,
            colwise=colwise,
            sums=sums,
            **options,
        )

    if colwise_in_blocks:
        _, transposed = layouts("ij", block, None, colwise, sums)
    else:
        _, transposed = layouts("i", (block[0], 1), None, colwise)
    main, _ = layouts("j", (1, block[1]), rowwise, None)
    return Layouts(main, transposed)


def _vectors_rule(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: str | None,
    colwise: str | None,
    **_options: Any,
) -> ShardingRule:
    stack = "b" if seeds.ndim == 1 else "b p"
    row = block_axis("i", x.shape[-2], VECTOR_GRANULARITY[0]).codes
    if x.ndim == 4 and seeds.ndim == 1:
        row = f"g {row}"
    column = block_axis("j", x.shape[-1], VECTOR_GRANULARITY[1]).codes
    words: Any = Quantized
    row_words = words(f"{stack} {row} {column}", f"{stack} {row} .")
    column_words = words(f"{stack} {column} {row}", f"{stack} {column} .")
    results = wanted_layouts((row_words, column_words), rowwise, colwise)
    return ShardingRule((row_words.codes, stack), results)


def _vectors_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> Layouts:
    if shard.assignment.axes_of("gij"):
        across, along = ("gij", "gij") if options.get("per_tensor") else ("j", "gi")
        reduce = AmaxReduce(shard.all_reduce_amax(across), shard.all_reduce_amax(along))
        options = options | {"amax_reduce": reduce}
    has_parts = operands[1].ndim == 2
    function = functools.partial(_quantize_parts, run) if has_parts else run
    return round_on_shard(function, shard, operands, options)


def _quantize_parts(
    quantize: Callable[..., Layouts], x: jax.Array, seeds: jax.Array, **options: Any
) -> Layouts:
    """Quantizes parts ``[B, P, R, C]`` as matrices ``[B * P, R, C]``."""
    stack = x.shape[:2]
    merged = x.reshape(seeds.size, *x.shape[2:])
    layouts = quantize(merged, seeds.reshape(-1), **options)
    return jax.tree.map(lambda y: y.reshape(*stack, *y.shape[1:]), layouts)


def _fallback_rule(
    x: jax.Array,
    _theta: jax.Array,
    seeds: Seeds,
    *,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> ShardingRule:
    layouts = block_layouts(x.shape, block)
    results = fallback_words(layouts, criterion, colwise)
    return ShardingRule((layouts[0].codes, "b", seed_words(seeds)), results)


_BLOCK_KERNELS = triton_kernels("fbq_jax.kernels.triton.quantize") | {
    "tpu": Kernel("tpu", "fbq_jax.kernels.tpu.quantize", tpu_refusal)
}
_ROW_BLOCK_KERNELS = triton_kernels(
    "fbq_jax.kernels.triton.quantize_row_blocks", float8_refusal=float8_refusal
)
_VECTOR_KERNELS = triton_kernels(
    "fbq_jax.kernels.triton.quantize_vectors", refusal=nvidia_refusal
) | {"tpu": Kernel("tpu", "fbq_jax.kernels.tpu.quantize_vectors", tpu_refusal)}
quantize = define_op(
    reference.quantize,
    _quantize_rule,
    functools.partial(_quantize_on_shard, quantize_split_blocks),
    kernels=_BLOCK_KERNELS
    | triton_kernels("fbq_jax.kernels.triton.quantize", float8_refusal=float8_refusal),
)
quantize_row_blocks = define_op(
    reference.quantize_row_blocks,
    _row_blocks_rule,
    functools.partial(_quantize_on_shard, _quantize_split_row_blocks),
    kernels=_ROW_BLOCK_KERNELS,
)
quantize_vectors = define_op(
    reference.quantize_vectors,
    _vectors_rule,
    _vectors_on_shard,
    kernels=_VECTOR_KERNELS,
)
quantize_fallback = define_op(
    reference.quantize_fallback,
    _fallback_rule,
    round_on_shard,
    kernels=_BLOCK_KERNELS,
)
