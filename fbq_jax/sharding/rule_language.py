"""Sharding rules: a language that describes how the arrays of an op may be sharded.

A rule has one string per array and one word per axis, such as ``"b i128 j128"``.  A
word is a factor, which is one letter, followed by the factor's granularity on this
axis: the number of consecutive elements that must stay on one device (by default 1).
Axes with the same factor are sharded in the same way.  ``"."`` is an axis that is never
sharded; a number after it is a granularity for which the axis is too short or uneven.

The ops use these letters: ``b`` for the stack of matrices, ``p`` for parts of a matrix
with separate scales, ``g`` and ``i`` for rows, ``j`` for columns.  A product has rows
``i``, columns ``n`` and the contraction ``k``; a ragged product also has row tiles
``t`` and groups ``e``, and may have parts of groups ``d`` and their copies ``c``.

Rows may be two axes ``[..., G, R, ...]``, such as sequences and their tokens, and a
mesh may shard both.  No block spans two sequences.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax import export

UNSHARDED = "."


class ShardingRule(NamedTuple):
    """How the arrays of an op may be sharded.

    Attributes:
      operands: a tuple with one tree per operand, with one string per array.
      results: a tree with one string per array of the results.
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
    """A factor and its granularity on one axis: a parsed word."""

    name: str
    granularity: int


class AxisWords(NamedTuple):
    """The words of the axes of codes and of their scales."""

    codes: str
    scales: str


UNSHARDED_AXIS = AxisWords(UNSHARDED, UNSHARDED)


def parse_factors(words: str) -> list[Factor]:
    """Parses the words of an array: the factor of each axis.

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
    """Pairs each array with its words, from two trees of the same structure."""
    return zip(jax.tree.leaves(words), jax.tree.leaves(arrays), strict=True)


def word(factor: str, granularity: int) -> str:
    """Formats a factor and its granularity as one word.

    >>> word("i", 128), word("i", 1)
    ('i128', 'i')
    """
    return factor if granularity == 1 else f"{factor}{granularity}"


def block_axis(factor: str, size: int, side: int) -> AxisWords:
    """The words of an axis that consists of blocks of ``side`` elements.

    It may be sharded between blocks, unless it has a partial block or only one block.
    An axis with a symbolic size is not sharded: Shardy's rules need constant sizes.
    """
    if export.is_symbolic_dim(size) or size % side or size < 2 * side:
        return AxisWords(word(UNSHARDED, side), UNSHARDED)
    return AxisWords(word(factor, side), factor)


def row_axes(shape: tuple[int, ...], side: int) -> AxisWords:
    """The words of the rows of ``[B, R, C]``, or both row axes of ``[B, G, R, C]``."""
    rows = block_axis("i", shape[-2], side)
    if len(shape) == 3:
        return rows
    assert shape[2] % side == 0, "a block spans two sequences"
    return AxisWords(f"g {rows.codes}", f"g {rows.scales}")
