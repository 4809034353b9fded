"""The ops that quantize matrices, and the op that measures their blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import (
    AmaxReduce,
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
)
from fbq_jax.kernels.rounding import Rounding
from fbq_jax.ops.backends import nvidia_refusal, triton_kernels
from fbq_jax.ops.op import LocalOp, Op, register
from fbq_jax.ops.transformations import call
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
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


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """Quantizes matrices to INT8 with one scale per block.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``, or ``[B, G, R, C]`` with
        ``G * R`` rows, whose colwise codes are ``[B, C, G, R]``.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      block: rows and columns of a block.
      rowwise: the rounding of the rowwise codes, or None to omit them.
      colwise: the rounding of the colwise codes, or None to omit them.
      implementation: as in ``dispatch.choose``.

    Returns:
      The result of ``kernels.reference.quantize``.
    """
    options = {"block": block, "rowwise": rowwise, "colwise": colwise}
    return call(QUANTIZE, (x, seeds), block, options, implementation)


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    bound: float = 127.0,
    per_tensor: bool = False,
    implementation: str | None = None,
) -> Layouts:
    """Quantizes matrices to INT8 with one scale per row or column.

    Args:
      x: ``[B, R, C]`` or ``[B, G, R, C]`` as in ``quantize``; ``[B, P, R, C]`` with
        seeds ``[B, P]``.  Then each of the P parts of a matrix has its own scales and
        noise, and colwise codes are ``[B, P, C, R]``.
      seeds: uint32 ``[B]`` or ``[B, P]``, the seeds of stochastic rounding.
      rowwise: the rounding of the rowwise codes, or None to omit them.
      colwise: the rounding of the colwise codes, or None to omit them.
      bound: the value that ``max |x|`` is scaled to.
      per_tensor: whether all rows and columns of a matrix share one scale.
      implementation: as in ``dispatch.choose``.

    Returns:
      The result of ``kernels.reference.quantize_vectors``.
    """
    roundings = {"rowwise": rowwise, "colwise": colwise}
    options = {**roundings, "bound": bound, "per_tensor": per_tensor}
    return call(QUANTIZE_VECTORS, (x, seeds), (), options, implementation)


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> FallbackQuantized:
    """Quantizes matrices, with a second term in the blocks whose metric exceeds theta.

    Args:
      x: ``[B, R, C]`` or ``[B, G, R, C]`` as in ``quantize``.
      theta: float32 ``[B]``, the thresholds.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      block: rows and columns of a block.
      criterion: the metric, ``"absmax"``, ``"l1"`` or ``"l1_rel"``.
      colwise: the rounding of the colwise codes, or None to omit them.
      implementation: as in ``dispatch.choose``.

    Returns:
      The result of ``kernels.reference.quantize_fallback``.
    """
    options = {"block": block, "criterion": criterion, "colwise": colwise}
    return call(QUANTIZE_FALLBACK, (x, theta, seeds), block, options, implementation)


def block_metric(
    x: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the metric of ``quantize_fallback``: float32, one value per block.

    Args:
      x: ``[B, R, C]`` or ``[B, G, R, C]`` as in ``quantize``.
      block: rows and columns of a block.
      criterion: the metric, ``"absmax"``, ``"l1"`` or ``"l1_rel"``.
      implementation: as in ``dispatch.choose``.
    """
    options = {"block": block, "criterion": criterion}
    return call(BLOCK_METRIC, (x,), block, options, implementation)


def if_wanted(words: Any, rounding: str | None) -> Any:
    """The words of a layout, or None if the layout has no rounding."""
    return None if rounding is None else words


def block_layouts(shape: tuple[int, ...], block: Block) -> Any:
    """The words of the codes and scales of matrices, rowwise and colwise."""
    return layout_words(row_axes(shape, block[0]), block_axis("j", shape[-1], block[1]))


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
    x: jax.Array, *_seeds: Any, block: Block, rowwise: str | None, colwise: str | None
) -> ShardingRule:
    row_words, column_words = block_layouts(x.shape, block)
    results = Layouts(if_wanted(row_words, rowwise), if_wanted(column_words, colwise))
    splittable = "ij" if x.ndim == 3 else "j"
    return ShardingRule((row_words.codes, "b"), results, splittable=splittable)


def _quantize_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> Layouts:
    if not shard.assignment.intra_block_axes:
        return round_on_shard(run, shard, operands, options)
    split = functools.partial(quantize_split_blocks, shard.assignment)
    return round_on_shard(split, shard, operands, options)


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
    row_words, _ = layout_words(
        AxisWords(row, row), AxisWords(column, UNSHARDED), stack
    )
    _, column_words = layout_words(
        AxisWords(row, UNSHARDED), AxisWords(column, column), stack
    )
    results = Layouts(if_wanted(row_words, rowwise), if_wanted(column_words, colwise))
    return ShardingRule((row_words.codes, stack), results)


def _vectors_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> Layouts:
    across, along = ("gij", "gij") if options["per_tensor"] else ("j", "gi")
    amax_reduce = AmaxReduce(
        shard.all_reduce_amax(across), shard.all_reduce_amax(along)
    )
    has_parts = operands[1].ndim == 2
    function = functools.partial(_quantize_parts, run) if has_parts else run
    return round_on_shard(
        function, shard, operands, options | {"amax_reduce": amax_reduce}
    )


def _quantize_parts(
    quantize: Callable[..., Layouts], x: jax.Array, seeds: jax.Array, **options: Any
) -> Layouts:
    """Quantizes parts ``[B, P, R, C]`` as matrices ``[B * P, R, C]``."""
    stack = x.shape[:2]
    merged = x.reshape(seeds.size, *x.shape[2:])
    layouts = quantize(merged, seeds.reshape(-1), **options)
    return jax.tree.map(lambda y: y.reshape(*stack, *y.shape[1:]), layouts)


def _fallback_rule(
    x: jax.Array, *_operands: Any, block: Block, colwise: str | None, **_options: Any
) -> ShardingRule:
    main, column_words = block_layouts(x.shape, block)
    results = FallbackQuantized(
        main, main, main.scales, if_wanted(column_words, colwise)
    )
    return ShardingRule((main.codes, "b", "b"), results)


def _metric_rule(x: jax.Array, *, block: Block, **_options: Any) -> ShardingRule:
    main, _ = block_layouts(x.shape, block)
    return ShardingRule((main.codes,), main.scales)


QUANTIZE = Op(
    "quantize",
    reference=reference.quantize,
    sharding_rule=_quantize_rule,
    on_shard=_quantize_on_shard,
    kernels=triton_kernels("fbq_jax.kernels.triton.quantize"),
)
QUANTIZE_VECTORS = Op(
    "quantize_vectors",
    reference=reference.quantize_vectors,
    sharding_rule=_vectors_rule,
    on_shard=_vectors_on_shard,
    kernels=triton_kernels(
        "fbq_jax.kernels.triton.quantize_vectors", refusal=nvidia_refusal
    ),
)
QUANTIZE_FALLBACK = Op(
    "quantize_fallback",
    reference=reference.quantize_fallback,
    sharding_rule=_fallback_rule,
    on_shard=round_on_shard,
    kernels=triton_kernels("fbq_jax.kernels.triton.quantize"),
)
BLOCK_METRIC = Op(
    "block_metric",
    reference=reference.block_metric,
    sharding_rule=_metric_rule,
    on_shard=lambda run, shard, operands, options: shard.run(run, operands, **options),
    kernels=triton_kernels("fbq_jax.kernels.triton.quantize"),
)
register(QUANTIZE, QUANTIZE_VECTORS, QUANTIZE_FALLBACK, BLOCK_METRIC)
