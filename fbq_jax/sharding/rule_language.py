"""The language in which an op says how its arrays may be sharded.

A rule has one string an array and one word an axis, such as ``"b i128 j128"``.  A word
is a factor, one letter, followed by the factor's granularity on this axis: the number
of consecutive elements that must stay on one device (1 where it is omitted).  Axes with
the same factor are sharded alike.  ``"."`` is an axis that is never sharded; a number
after it is the granularity that the axis is too short or too uneven for.

The ops use these letters: ``b`` for the stack of matrices, ``p`` for parts of a matrix
that have scales of their own, ``g`` and ``i`` for rows, ``j`` for columns.  A product
has rows ``i``, columns ``n`` and the contraction ``k``; a ragged product also has row
tiles ``t`` and groups ``e``.

Rows may be two axes ``[..., G, R, ...]``, such as sequences and their tokens, and a
mesh may shard both.  No block straddles two sequences.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from fbq_jax.kernels.reference import Quantized

UNSHARDED = "."


class ShardingRule(NamedTuple):
    """How the arrays of an op may be sharded.

    Attributes:
      operands: a tuple with one tree an operand, of one string an array.
      results: the same for the results.
      contracted: the factors that operands share and results lack, in the order of the
        operands' axes.
      splittable: the factors whose blocks may be split between devices, which then
        all-reduce each block's maximum.
    """

    operands: tuple[Any, ...]
    results: Any
    contracted: str = ""
    splittable: str = ""


class Factor(NamedTuple):
    """One word of a rule."""

    name: str
    granularity: int


class AxisWords(NamedTuple):
    """The words of the axes of codes and of their scales."""

    codes: str
    scales: str


def parse_factors(words: str) -> list[Factor]:
    """The factor of each axis.

    >>> parse_factors("b i128 .")
    [Factor(name='b', granularity=1), Factor(name='i', granularity=128), \
Factor(name='.', granularity=1)]
    """
    return [Factor(word[0], int(word[1:] or 1)) for word in words.split()]


def factor_names(words: str) -> str:
    """The letters of the factors, in the order of the axes.

    >>> factor_names("b i128 .")
    'bi.'
    """
    return "".join(factor.name for factor in parse_factors(words))


def pair_leaves(words: Any, arrays: Any) -> Iterator[tuple[str, Any]]:
    """Each array with its string, from two trees of the same structure."""
    return zip(jax.tree.leaves(words), jax.tree.leaves(arrays), strict=True)


def word(factor: str, granularity: int) -> str:
    """One word.

    >>> word("i", 128), word("i", 1)
    ('i128', 'i')
    """
    return factor if granularity == 1 else f"{factor}{granularity}"


def block_axis(factor: str, size: int, side: int) -> AxisWords:
    """An axis in blocks of ``side`` elements, which is sharded between blocks.

    An axis with a partial block, or with one block only, is never sharded.
    """
    if size % side or size < 2 * side:
        return AxisWords(word(UNSHARDED, side), UNSHARDED)
    return AxisWords(word(factor, side), factor)


def row_axes(shape: tuple[int, ...], side: int) -> AxisWords:
    """The rows of ``[B, R, C]``, or both row axes of ``[B, G, R, C]``."""
    rows = block_axis("i", shape[-2], side)
    if len(shape) == 3:
        return rows
    assert shape[2] % side == 0, "a block straddles two sequences"
    return AxisWords(f"g {rows.codes}", f"g {rows.scales}")


def layout_words(rows: AxisWords, columns: AxisWords, stack: str = "b") -> Any:
    """Codes and scales of matrices, rowwise and colwise."""
    pairs = list(zip(rows, columns, strict=True))
    quantized: Any = Quantized
    return (
        quantized(*(f"{stack} {row} {column}" for row, column in pairs)),
        quantized(*(f"{stack} {column} {row}" for row, column in pairs)),
    )
