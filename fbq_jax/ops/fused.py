"""The ops that fuse a norm or a gate with the quantization of its result."""

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
    """RMS-normalizes rows, and quantizes and packs the result.

    Args:
      x: ``[B, R, C]``, bfloat16, float16 or float32.
      norm_scale: ``[B, C]``, multiplies the normalized rows.
      theta: float32 ``[B]``, the thresholds of fallback.
      seeds: uint32 ``[B]``, of the noise of stochastic rounding.
      epsilon: added to the mean square.
      bits: of a packed value.
      block: the rows and columns of a block.
      criterion: of fallback; None for no second term.
      colwise: the rounding of the colwise codes; None for no such codes.
      implementation: as ``dispatch.choose`` takes it.

    Returns:
      What ``kernels.fused_reference.rms_norm_quantize`` returns.
    """
    return call(
        RMS_NORM_QUANTIZE,
        (x, norm_scale, theta, seeds),
        block,
        width=x.shape[2],
        implementation=implementation,
        epsilon=epsilon,
        bits=bits,
        block=block,
        criterion=criterion,
        colwise=colwise,
    )


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
    """Computes ``silu(gate) * up``, quantizes it and packs its slopes.

    Args:
      gate_up: ``[B, R, 2 * C]`` as ``kernels.fused_reference.join_gate_up`` joins it.
      theta: float32 ``[B]``, the thresholds of fallback.
      seeds: uint32 ``[B]``, of the noise of stochastic rounding.
      bits: of a packed slope.
      block: the rows and columns of a block.
      criterion: of fallback; None for no second term.
      colwise: the rounding of the colwise codes; None for no such codes.
      implementation: as ``dispatch.choose`` takes it.

    Returns:
      What ``kernels.fused_reference.silu_gate_quantize`` returns.
    """
    return call(
        SILU_GATE_QUANTIZE,
        (gate_up, theta, seeds),
        block,
        width=gate_up.shape[2] // 2,
        implementation=implementation,
        bits=bits,
        block=block,
        criterion=criterion,
        colwise=colwise,
    )


def silu_gate_grad_quantize(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """Multiplies a gradient with the slopes of a gate, and quantizes the result.

    Args:
      dy: ``[B, R, C]``, the gradient of the gate's output.
      by_gate: the packed slopes with respect to the gate.
      by_up: the packed slopes with respect to the gated values.
      seeds: uint32 ``[B]``, of the noise of stochastic rounding.
      bits: of a packed slope.
      block: the rows and columns of a block.
      rowwise: the rounding of the rowwise codes; None for no such codes.
      colwise: the rounding of the colwise codes; None for no such codes.
      implementation: as ``dispatch.choose`` takes it.

    Returns:
      What ``kernels.fused_reference.silu_gate_grad_quantize`` returns, of
      ``[B, R, 2 * C]``.
    """
    return call(
        SILU_GATE_GRAD_QUANTIZE,
        (dy, by_gate, by_up, seeds),
        block,
        width=dy.shape[2],
        implementation=implementation,
        bits=bits,
        block=block,
        rowwise=rowwise,
        colwise=colwise,
    )


def _two_pass_caveat(block_shape: Sequence[int], width: int | None) -> str:
    """Says where a kernel does not do all of an op in one pass."""
    group = packing.GROUP
    if block_shape[1] == group and (width is None or width % group == 0):
        return ""
    return (
        f"; not in one pass, but by its definition and a kernel that quantizes: one "
        f"pass takes blocks {group} wide and rows of whole blocks, not blocks "
        f"{block_shape[1]} wide" + ("" if width is None else f" and rows of {width}")
    )


def _operand_words(
    main: Quantized,
    by_columns: Quantized,
    criterion: str | None,
    colwise: str | None,
) -> Any:
    words: Any = Operand
    by_columns = if_wanted(by_columns, colwise)
    if criterion is None:
        return words(main, None, "b . .", by_columns)
    return words(main, main, main.scales, by_columns)


def _unsharded(size: int) -> str:
    del size
    return UNSHARDED


def _packed_columns(columns: int, granularity: int) -> Callable[[int], str]:
    """Makes the words of the axes that belong to the same columns.

    The words' argument is an axis' number of elements for ``granularity`` columns.
    """
    if columns % granularity or columns < 2 * granularity:
        return _unsharded
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
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> ShardingRule:
    """Columns are not sharded: the means are of whole rows."""
    del norm_scale, theta, seeds, epsilon
    rows = row_axes(x.shape, block[0])
    main, by_columns = layout_words(rows, AxisWords(UNSHARDED, UNSHARDED))
    operand = _operand_words(main, by_columns, criterion, colwise)
    packed = _packed_words(rows.codes, _unsharded, packing.GROUP, bits)
    rstd: Any = f"b {rows.codes} ."
    results = NormQuantized(operand, packed, rstd)
    return ShardingRule((main.codes, "b .", "b", "b"), results)


def _gate_rule(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> ShardingRule:
    del theta, seeds
    rows = row_axes(gate_up.shape, block[0])
    granularity = max(block[1], packing.GROUP)
    column = _packed_columns(gate_up.shape[-1] // 2, granularity)
    columns = AxisWords(column(granularity), column(granularity // block[1]))
    main, by_columns = layout_words(rows, columns)
    operand = _operand_words(main, by_columns, criterion, colwise)
    packed = _packed_words(rows.codes, column, granularity, bits)
    operands = f"b {rows.codes} {column(2 * granularity)}", "b", "b"
    return ShardingRule(operands, GateQuantized(operand, packed, packed))


def _gate_grad_rule(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
) -> ShardingRule:
    del by_gate, by_up, seeds
    granularity = packing.GROUP
    column = _packed_columns(dy.shape[-1], granularity)
    rows = row_axes(dy.shape, block[0])
    columns = AxisWords(column(2 * granularity), column(2 * granularity // block[1]))
    by_rows, by_columns = layout_words(rows, columns)
    results = Layouts(if_wanted(by_rows, rowwise), if_wanted(by_columns, colwise))
    packed = _packed_words(rows.codes, column, granularity, bits)
    operands = f"b {rows.codes} {column(granularity)}", packed, packed, "b"
    return ShardingRule(operands, results)


_KERNELS = triton_kernels("fbq_jax.kernels.triton.fused", caveat=_two_pass_caveat)
RMS_NORM_QUANTIZE = register(
    Op(
        "rms_norm_quantize",
        reference=fused_reference.rms_norm_quantize,
        sharding_rule=_rms_norm_rule,
        on_shard=round_on_shard,
        kernels=_KERNELS,
    )
)
SILU_GATE_QUANTIZE = register(
    Op(
        "silu_gate_quantize",
        reference=fused_reference.silu_gate_quantize,
        sharding_rule=_gate_rule,
        on_shard=functools.partial(round_on_shard, columns_of=lambda width: width // 2),
        kernels=_KERNELS,
    )
)
SILU_GATE_GRAD_QUANTIZE = register(
    Op(
        "silu_gate_grad_quantize",
        reference=fused_reference.silu_gate_grad_quantize,
        sharding_rule=_gate_grad_rule,
        on_shard=functools.partial(round_on_shard, columns_of=lambda width: 2 * width),
        kernels=_KERNELS,
    )
)
