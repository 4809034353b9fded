"""Norms, gates and gates' gradients as sources of ``quantize``."""

import functools
from collections.abc import Callable
from typing import Any

from fbq_jax.kernels import packing
from fbq_jax.kernels.layer_sources import Gate, GateGrad, Norm, SavedNorm
from fbq_jax.kernels.packing import Packed
from fbq_jax.ops.quantization import KINDS, SourceKind, SourceWords, rows_of, words_of
from fbq_jax.sharding.rule_language import UNSHARDED, UNSHARDED_AXIS, AxisWords, word


def _norm_words(source: Norm, stack: str, sides: tuple[int, int]) -> SourceWords:
    """Columns are not sharded, because each mean is over a whole row."""
    rows = rows_of(source.values.shape, stack, sides[0])
    packed = _packed_words(rows.codes, _unsharded, packing.GROUP, source.bits)
    rstd: Any = f"b {rows.codes} ."
    words = words_of(source, f"b {rows.codes} .", "b .")
    return words, SavedNorm(packed, rstd), rows, UNSHARDED_AXIS


def _gate_words(
    source: Gate | GateGrad, stack: str, sides: tuple[int, int]
) -> SourceWords:
    values: Any = source.values
    rows, counts = rows_of(values.shape, stack, sides[0]), None
    if source.row_counts is not None:  # not sharded where some rows are missing
        rows, counts = UNSHARDED_AXIS, "b"
    halves = 1 if isinstance(source, Gate) else 2  # of an output column in a half
    unit = max(sides[1], packing.GROUP) if isinstance(source, Gate) else packing.GROUP
    column: Callable[[int], str] = _unsharded
    if source.interleaved:  # each shard of the columns has both gate and up
        column = _packed_columns(values.shape[-1] // (3 - halves), unit)
    columns = AxisWords(column(halves * unit), column(halves * unit // sides[1]))
    factors = _packed_words(f". {rows.codes}", column, unit, source.bits)
    values = f"b {rows.codes} {column((3 - halves) * unit)}"
    if isinstance(source, Gate):
        return words_of(source, values, counts), factors, rows, columns
    return words_of(source, values, factors, counts), (), rows, columns


def _unsharded(_: int) -> str:
    return UNSHARDED


def _packed_columns(columns: int, granularity: int) -> Callable[[int], str]:
    """Returns a function that makes the word of each axis along these columns.

    Its argument is the number of elements that an axis has per ``granularity`` columns.
    """
    if columns % granularity or columns < 2 * granularity:
        return _unsharded
    return functools.partial(word, "j")


def _packed_words(
    row: str, column: Callable[[int], str], granularity: int, bits: int
) -> Any:
    words: Any = Packed
    return words(
        f"b {row} {column(granularity * bits // 32)}",
        f"b {row} {column(granularity // packing.GROUP)}",
    )


KINDS[Norm] = SourceKind(_norm_words, most_rows=256)
KINDS[Gate] = SourceKind(_gate_words, (2, 1), most_rows=256)
KINDS[GateGrad] = SourceKind(_gate_words, (1, 2), most_rows=128)
