"""The ops that fuse a norm or a gate with the quantization of its output."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fbq_jax.kernels import fused_reference, packing
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Block, Layouts
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.ops.backends import float8_refusal, tpu_refusal, triton_kernels
from fbq_jax.ops.op import Kernel
from fbq_jax.ops.quantization import (
    fallback_words,
    round_on_shard,
    row_block_layouts,
    seed_words,
    wanted_layouts,
)
from fbq_jax.ops.transformations import define_op
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    UNSHARDED_AXIS,
    AxisWords,
    ShardingRule,
    layout_words,
    row_axes,
    word,
)


def _two_pass_caveat(
    block_shape: Sequence[int], width: int | None, *, most_rows: int = 256
) -> str:
    """Text for shapes where the op takes two passes; ``most_rows`` is of a block."""
    group = packing.GROUP
    rows, columns = block_shape
    fits = columns == group and rows <= most_rows
    if fits and (width is None or width % group == 0):
        return ""
    return (
        f"not in one pass, but as jax.numpy code and a kernel that quantizes: one "
        f"pass needs blocks {group} wide with up to {most_rows} rows, and rows that "
        f"are multiples of {group}, not blocks {columns} wide with {rows} rows"
        + ("" if width is None else f" and rows of {width}")
    )


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
    _norm_scale: jax.Array,
    _theta: jax.Array,
    seeds: Seeds,
    *,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
    **_options: Any,
) -> ShardingRule:
    """Columns are not sharded, because each mean is over a whole row."""
    rows = row_axes(x.shape, block[0])
    layouts = layout_words(rows, UNSHARDED_AXIS)
    operand = fallback_words(layouts, criterion, colwise)
    packed = _packed_words(rows.codes, lambda _: UNSHARDED, packing.GROUP, bits)
    rstd: Any = f"b {rows.codes} ."
    results = NormQuantized(operand, packed, rstd)
    operands = layouts[0].codes, "b .", "b", seed_words(seeds)
    return ShardingRule(operands, results)


def _rms_norm_row_blocks_rule(
    x: jax.Array,
    _norm_scale: jax.Array,
    seeds: Seeds,
    *,
    bits: int,
    block: Block,
    **options: Any,
) -> ShardingRule:
    """Columns are not sharded, because each mean is over a whole row."""
    rows = row_axes(x.shape, block[0])
    layouts = _row_block_layouts(rows, UNSHARDED_AXIS, **options)
    packed = _packed_words(rows.codes, lambda _: UNSHARDED, packing.GROUP, bits)
    rstd: Any = f"b {rows.codes} ."
    operands = f"b {rows.codes} .", "b .", seed_words(seeds)
    return ShardingRule(operands, NormQuantized(layouts, packed, rstd))


def _row_block_layouts(
    rows: AxisWords,
    columns: AxisWords,
    *,
    rowwise: str | None,
    colwise: str | None,
    colwise_in_blocks: bool = False,
    sums: tuple[str, ...] = (),
    **_options: Any,
) -> Layouts:
    """The words of both layouts, given those of whole blocks of rows and columns."""
    words = row_block_layouts(rows, columns, colwise_in_blocks=colwise_in_blocks)
    return wanted_layouts(words, rowwise, colwise, sums)


def _gate_rows(
    shape: tuple[int, ...], side: int, row_counts: tuple[jax.Array | None, ...]
) -> AxisWords:
    """The words of the rows; they are not sharded where some are missing."""
    if jax.tree.leaves(row_counts):
        return UNSHARDED_AXIS
    return row_axes(shape, side)


def _gate_columns(
    columns: int, granularity: int, *, interleaved: bool
) -> Callable[[int], str]:
    """``_packed_columns``, if each shard of the columns has both gate and up."""
    if not interleaved:
        return lambda _: UNSHARDED
    return _packed_columns(columns, granularity)


def _gate_rule(
    gate_up: jax.Array,
    _theta: jax.Array,
    seeds: Seeds,
    *row_counts: jax.Array | None,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
    interleaved: bool = True,
) -> ShardingRule:
    rows = _gate_rows(gate_up.shape, block[0], row_counts)
    granularity = max(block[1], packing.GROUP)
    column = _gate_columns(gate_up.shape[-1] // 2, granularity, interleaved=interleaved)
    columns = AxisWords(column(granularity), column(granularity // block[1]))
    operand = fallback_words(layout_words(rows, columns), criterion, colwise)
    packed = _packed_words(rows.codes, column, granularity, bits)
    gate_up_words = f"b {rows.codes} {column(2 * granularity)}"
    counts = jax.tree.map(lambda _: "b", row_counts)
    operands = gate_up_words, "b", seed_words(seeds), *counts
    return ShardingRule(operands, GateQuantized(operand, packed, packed))


def _gate_row_blocks_rule(
    gate_up: jax.Array, seeds: Seeds, *, bits: int, block: Block, **options: Any
) -> ShardingRule:
    rows = row_axes(gate_up.shape, block[0])
    granularity = max(block[1], packing.GROUP)
    column = _packed_columns(gate_up.shape[-1] // 2, granularity)
    columns = AxisWords(column(granularity), column(granularity // block[1]))
    layouts = _row_block_layouts(rows, columns, **options)
    packed = _packed_words(rows.codes, column, granularity, bits)
    operands = f"b {rows.codes} {column(2 * granularity)}", seed_words(seeds)
    return ShardingRule(operands, GateQuantized(layouts, packed, packed))


def _gate_grad_row_blocks_rule(
    dy: jax.Array,
    _gate_factor: Packed,
    _up_factor: Packed,
    seeds: Seeds,
    *,
    bits: int,
    block: Block,
    **options: Any,
) -> ShardingRule:
    rows = row_axes(dy.shape, block[0])
    granularity = packing.GROUP
    column = _packed_columns(dy.shape[-1], granularity)
    columns = AxisWords(column(2 * granularity), column(2 * granularity // block[1]))
    layouts = _row_block_layouts(rows, columns, **options)
    packed = _packed_words(rows.codes, column, granularity, bits)
    dy_words = f"b {rows.codes} {column(granularity)}"
    return ShardingRule((dy_words, packed, packed, seed_words(seeds)), layouts)


def _gate_grad_rule(
    dy: jax.Array,
    _gate_factor: Packed,
    _up_factor: Packed,
    seeds: Seeds,
    *row_counts: jax.Array | None,
    bits: int,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
    sums: tuple[str, ...] = (),
    interleaved: bool = True,
) -> ShardingRule:
    granularity = packing.GROUP
    column = _gate_columns(dy.shape[-1], granularity, interleaved=interleaved)
    rows = _gate_rows(dy.shape, block[0], row_counts)
    columns = AxisWords(column(2 * granularity), column(2 * granularity // block[1]))
    results = wanted_layouts(layout_words(rows, columns), rowwise, colwise, sums)
    packed = _packed_words(rows.codes, column, granularity, bits)
    dy_words = f"b {rows.codes} {column(granularity)}"
    counts = jax.tree.map(lambda _: "b", row_counts)
    operands = dy_words, packed, packed, seed_words(seeds), *counts
    return ShardingRule(operands, results)


def _kernels(*, most_rows: int = 256, **fields: Any) -> dict[str, Kernel]:
    """The Triton kernels of an op; of a block, registers hold up to ``most_rows``."""
    caveat = functools.partial(_two_pass_caveat, most_rows=most_rows)
    return triton_kernels("fbq_jax.kernels.triton.fused", caveat=caveat, **fields)


_TPU = {"tpu": Kernel("tpu", "fbq_jax.kernels.tpu.fused", tpu_refusal)}
_NORM: dict[str, Any] = {
    "on_shard": round_on_shard,
    "packed_width": lambda operands: operands[0].shape[-1],
}
_GATE: dict[str, Any] = {
    "on_shard": functools.partial(round_on_shard, columns_of=lambda width: width // 2),
    "packed_width": lambda operands: operands[0].shape[-1] // 2,
}
_GATE_GRAD: dict[str, Any] = {
    "on_shard": functools.partial(round_on_shard, columns_of=lambda width: 2 * width),
    "packed_width": lambda operands: operands[0].shape[-1],
}
rms_norm_quantize = define_op(
    fused_reference.rms_norm_quantize,
    _rms_norm_rule,
    kernels=_kernels() | _TPU,
    **_NORM,
)
rms_norm_quantize_row_blocks = define_op(
    fused_reference.rms_norm_quantize_row_blocks,
    _rms_norm_row_blocks_rule,
    kernels=_kernels(float8_refusal=float8_refusal),
    **_NORM,
)
silu_gate_quantize = define_op(
    fused_reference.silu_gate_quantize,
    _gate_rule,
    kernels=_kernels() | _TPU,
    **_GATE,
)
silu_gate_quantize_row_blocks = define_op(
    fused_reference.silu_gate_quantize_row_blocks,
    _gate_row_blocks_rule,
    kernels=_kernels(float8_refusal=float8_refusal),
    **_GATE,
)
silu_gate_grad_quantize = define_op(
    fused_reference.silu_gate_grad_quantize,
    _gate_grad_rule,
    kernels=_kernels(most_rows=128) | _TPU,
    **_GATE_GRAD,
)
silu_gate_grad_quantize_row_blocks = define_op(
    fused_reference.silu_gate_grad_quantize_row_blocks,
    _gate_grad_row_blocks_rule,
    kernels=_kernels(most_rows=128, float8_refusal=float8_refusal),
    **_GATE_GRAD,
)
