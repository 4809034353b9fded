"""The ops that fuse a norm or a gate with the quantization of its output."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fbq_jax.kernels import fused_reference, packing
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized, Operand
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Block, Criterion, Layouts, Quantized
from fbq_jax.kernels.rounding import Rounding
from fbq_jax.ops.backends import triton_kernels
from fbq_jax.ops.op import Op, register
from fbq_jax.ops.quantization import if_wanted, round_on_shard
from fbq_jax.ops.transformations import call
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    UNSHARDED_AXIS,
    AxisWords,
    ShardingRule,
    layout_words,
    row_axes,
    word,
)


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> NormQuantized:
    """Quantizes the RMS norm of rows and packs the normalized rows.

    Args:
      x: ``[B, R, C]``, bfloat16, float16 or float32.
      norm_scale: float32 ``[B, C]``, multiplies the normalized rows.
      theta: float32 ``[B]``, the thresholds of fallback.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      epsilon: a constant added to the mean square.
      bits: the bits of each packed code, 4 to 12.
      block: rows and columns of a block.
      criterion: the criterion of fallback; None for no fallback.
      colwise: the rounding of the colwise codes, or None to omit them.
      implementation: as in ``dispatch.choose``.

    Returns:
      The result of ``kernels.fused_reference.rms_norm_quantize``.
    """
    operands, width = (x, norm_scale, theta, seeds), x.shape[2]
    options = {"epsilon": epsilon, "bits": bits, "block": block}
    options |= {"criterion": criterion, "colwise": colwise}
    return call(RMS_NORM_QUANTIZE, operands, block, options, implementation, width)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> GateQuantized:
    """Quantizes ``silu(gate) * up`` and packs the factors of its gradients.

    Args:
      gate_up: ``[B, R, 2 * C]``, from ``kernels.fused_reference.join_gate_up``.
      theta: float32 ``[B]``, the thresholds of fallback.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      bits: the bits of each packed code, 4 to 12.
      block: rows and columns of a block.
      criterion: the criterion of fallback; None for no fallback.
      colwise: the rounding of the colwise codes, or None to omit them.
      implementation: as in ``dispatch.choose``.

    Returns:
      The result of ``kernels.fused_reference.silu_gate_quantize``.
    """
    operands, width = (gate_up, theta, seeds), gate_up.shape[2] // 2
    options = {"bits": bits, "block": block, "criterion": criterion, "colwise": colwise}
    return call(SILU_GATE_QUANTIZE, operands, block, options, implementation, width)


def silu_gate_grad_quantize(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """Multiplies a gradient with each factor of a gate, and quantizes the result.

    Args:
      dy: ``[B, R, C]``, the gradient of the gate's output.
      gate_factor: the packed factor of the gate's gradient.
      up_factor: the packed factor of up's gradient.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      bits: the bits of each packed code, 4 to 12.
      block: rows and columns of a block.
      rowwise: the rounding of the rowwise codes, or None to omit them.
      colwise: the rounding of the colwise codes, or None to omit them.
      implementation: as in ``dispatch.choose``.

    Returns:
      The result of ``kernels.fused_reference.silu_gate_grad_quantize``, for
      ``[B, R, 2 * C]``.
    """
    operands, width = (dy, gate_factor, up_factor, seeds), dy.shape[2]
    options = {"bits": bits, "block": block, "rowwise": rowwise, "colwise": colwise}
    return call(
        SILU_GATE_GRAD_QUANTIZE, operands, block, options, implementation, width
    )


def _two_pass_caveat(block_shape: Sequence[int], width: int | None) -> str:
    """Text for shapes where the op takes two passes."""
    group = packing.GROUP
    if block_shape[1] == group and (width is None or width % group == 0):
        return ""
    return (
        f"; not in one pass, but as jax.numpy code and a kernel that quantizes: one "
        f"pass needs blocks {group} wide and rows that are multiples of {group}, not "
        f"blocks {block_shape[1]} wide"
        + ("" if width is None else f" and rows of {width}")
    )


def _operand_words(
    main: Quantized, column_words: Quantized, criterion: str | None, colwise: str | None
) -> Any:
    words: Any = Operand
    column_words = if_wanted(column_words, colwise)
    if criterion is None:
        return words(main, None, "b . .", column_words)
    return words(main, main, main.scales, column_words)


def _packed_columns(columns: int, granularity: int) -> Callable[[int], str]:
    """Returns a function that makes the word of each axis along these columns.

    Its argument is the number of elements that an axis has per ``granularity`` columns.
    """
    if columns % granularity or columns < 2 * granularity:
        return lambda _: UNSHARDED
    return functools.partial(word, "j")


def _packed_words(
    row: str, column: Callable[[int], str], granularity: int, bits: int
) -> Any:
    widths = packing.chunk_widths(bits)
    planes = [f"b {row} {column(granularity * width // 8)}" for width in widths]
    scales = f"b {row} {column(granularity // packing.GROUP)}"
    words: Any = Packed
    return words(tuple(planes), scales)


def _rms_norm_rule(
    x: jax.Array,
    *_operands: Any,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
    **_options: Any,
) -> ShardingRule:
    """Columns are not sharded, because each mean is over a whole row."""
    rows = row_axes(x.shape, block[0])
    main, column_words = layout_words(rows, UNSHARDED_AXIS)
    operand = _operand_words(main, column_words, criterion, colwise)
    packed = _packed_words(rows.codes, lambda _: UNSHARDED, packing.GROUP, bits)
    rstd: Any = f"b {rows.codes} ."
    results = NormQuantized(operand, packed, rstd)
    return ShardingRule((main.codes, "b .", "b", "b"), results)


def _gate_rule(
    gate_up: jax.Array,
    *_operands: Any,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> ShardingRule:
    rows = row_axes(gate_up.shape, block[0])
    granularity = max(block[1], packing.GROUP)
    column = _packed_columns(gate_up.shape[-1] // 2, granularity)
    columns = AxisWords(column(granularity), column(granularity // block[1]))
    main, column_words = layout_words(rows, columns)
    operand = _operand_words(main, column_words, criterion, colwise)
    packed = _packed_words(rows.codes, column, granularity, bits)
    operands = f"b {rows.codes} {column(2 * granularity)}", "b", "b"
    return ShardingRule(operands, GateQuantized(operand, packed, packed))


def _gate_grad_rule(
    dy: jax.Array,
    *_operands: Any,
    bits: int,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
) -> ShardingRule:
    granularity = packing.GROUP
    column = _packed_columns(dy.shape[-1], granularity)
    rows = row_axes(dy.shape, block[0])
    columns = AxisWords(column(2 * granularity), column(2 * granularity // block[1]))
    row_words, column_words = layout_words(rows, columns)
    results = Layouts(if_wanted(row_words, rowwise), if_wanted(column_words, colwise))
    packed = _packed_words(rows.codes, column, granularity, bits)
    operands = f"b {rows.codes} {column(granularity)}", packed, packed, "b"
    return ShardingRule(operands, results)


_KERNELS = triton_kernels("fbq_jax.kernels.triton.fused", caveat=_two_pass_caveat)
RMS_NORM_QUANTIZE = Op(
    "rms_norm_quantize",
    reference=fused_reference.rms_norm_quantize,
    sharding_rule=_rms_norm_rule,
    on_shard=round_on_shard,
    kernels=_KERNELS,
)
SILU_GATE_QUANTIZE = Op(
    "silu_gate_quantize",
    reference=fused_reference.silu_gate_quantize,
    sharding_rule=_gate_rule,
    on_shard=functools.partial(round_on_shard, columns_of=lambda width: width // 2),
    kernels=_KERNELS,
)
SILU_GATE_GRAD_QUANTIZE = Op(
    "silu_gate_grad_quantize",
    reference=fused_reference.silu_gate_grad_quantize,
    sharding_rule=_gate_grad_rule,
    on_shard=functools.partial(round_on_shard, columns_of=lambda width: 2 * width),
    kernels=_KERNELS,
)
register(RMS_NORM_QUANTIZE, SILU_GATE_QUANTIZE, SILU_GATE_GRAD_QUANTIZE)
