"""The part of an op that one device computes.

On a single device that is all of it, the base class ``Shard``.  Over a mesh it is a
``MeshShard`` (``fbq_jax.sharding.collectives``), which overrides what devices exchange.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.kernels.rounding import GlobalOffset
from fbq_jax.sharding.rule_language import ShardingRule, factor_names, pair_leaves


@dataclasses.dataclass(frozen=True)
class Shard:
    """The share of an op that one device has; here, the whole op."""

    rule: ShardingRule

    def run(
        self, function: Callable[..., Any], operands: tuple[Any, ...], **options: Any
    ) -> Any:
        """Runs a function that takes rows as one axis.

        Row axes ``g`` and ``i`` are merged in operands and split again in results.
        Trailing operands of the rule may be omitted.
        """
        words = self.rule.operands[: len(operands)]
        results = function(*jax.tree.map(_merge_rows, words, operands), **options)
        split = functools.partial(_split_rows, _row_groups(words, operands))
        return jax.tree.map(split, self.rule.results, results)

    def is_sharded(self, factors: str) -> bool:
        """Whether several devices share the op along any of the factors."""
        del factors
        return False

    def shard_count(self, factor: str) -> int:
        """The number of shards along a factor."""
        del factor
        return 1

    def shard_index(self, factor: str) -> jax.Array:
        """The index of this device's shard along a factor, uint32 ``[]``."""
        del factor
        return jnp.uint32(0)

    def global_offset(
        self, groups: int, rows: int, columns: int
    ) -> GlobalOffset | None:
        """The offset of this shard in the global matrix, which selects its noise.

        Args:
          groups: the size of the shard along ``g``, or 1.
          rows: the size of the shard along ``i``.
          columns: the size of the shard along ``j``.
        """
        del groups, rows, columns
        return None

    def amax_reduce(self, *factors: str) -> Any:
        """The ``AmaxReduce`` of layouts whose scales devices share; or None.

        Args:
          *factors: the factors along which the values of each layout share a scale.
        """
        del factors
        return None

    def quantizer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What quantizes the shard: ``run``, unless devices split blocks."""
        return run

    def gather(self, x: jax.Array, factors: str, axis: int) -> jax.Array:
        """The shards of all devices along the factors, joined along an axis."""
        del factors, axis
        return x

    def partial_dtype(self, reduce: str | None, dtype: Any) -> Any:
        """The dtype of this device's partial product, if the sum is in ``dtype``."""
        del reduce
        return dtype

    def sum(self, part: jax.Array) -> jax.Array:
        """Sums partial products; each device gets its shard of the result."""
        return part

    def scatter(self, x: jax.Array, words: str) -> jax.Array:
        """This device's part of an array, along the axes that ``sum`` scatters."""
        del words
        return x

    def sum_in_int8(
        self,
        part: jax.Array,
        seeds: jax.Array,
        quantize: Callable[[jax.Array, jax.Array, tuple[int, int]], Any],
        dtype: Any,
    ) -> jax.Array:
        """Sums partial products, which devices exchange as INT8 codes.

        If the result is not sharded, its shares are gathered.

        Args:
          part: this device's partial sum, float32 ``[B, M, N]``.
          seeds: uint32 ``[B]``, the seeds of stochastic rounding.
          quantize: quantizes matrices stochastically, given their seeds and the block.
          dtype: the dtype of the result, in which shares are gathered.
        """
        del seeds, quantize, dtype
        return part


def _merge_rows(words: str, x: jax.Array) -> jax.Array:
    """Merges the axis ``g`` with the axis after it."""
    at = factor_names(words).find("g")
    if at < 0:
        return x
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _split_rows(groups: int, words: str, x: jax.Array) -> jax.Array:
    """The reverse of ``_merge_rows``."""
    at = factor_names(words).find("g")
    if at < 0:
        return x
    return x.reshape(*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])


def _row_groups(words: tuple[Any, ...], operands: tuple[Any, ...]) -> int:
    """The size of the axis ``g``, or 1 without one."""
    for text, x in pair_leaves(words, operands):
        if "g" in text:
            return x.shape[factor_names(text).find("g")]
    return 1
