"""The part of an op that one device computes, on its shards.

Shards end at block boundaries, and the codes and scales of a block depend on nothing
else.  Each device draws the noise at its offset in the global matrix.  So N devices
compute the same codes and scales as one device, bit for bit and without communication,
with two exceptions:

- The scale of a row or column that is sharded, or of a block that is split between
  devices, needs the maximum over these devices.
- A product whose contraction is sharded is summed over devices
  (``fbq_jax.sharding.collectives``).

If a product needs more of an operand than a device's shard, INT8 codes are gathered.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.rounding import ROW_GROUP, GlobalOffset
from fbq_jax.sharding.assignment import ShardAssignment
from fbq_jax.sharding.rule_language import ShardingRule, factor_names, pair_leaves


@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's share of an op: its sharding rule and the assigned mesh axes."""

    rule: ShardingRule
    assignment: ShardAssignment

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

    def global_offset(
        self, groups: int, rows: int, columns: int
    ) -> GlobalOffset | None:
        """The offset of this shard in the global matrix, which selects its noise.

        Args:
          groups: the size of the shard along ``g``, or 1.
          rows: the size of the shard along ``i``.
          columns: the size of the shard along ``j``.
        """
        assignment = self.assignment
        if not assignment.axes_of("gij"):
            return None
        merged = jnp.arange(0, groups * rows, ROW_GROUP, jnp.uint32)
        group = assignment.shard_index("g") * groups + merged // rows
        row = assignment.shard_index("i") * rows + merged % rows
        column = assignment.shard_index("j") * columns
        first = group * (rows * assignment.shard_count("i")) + row
        return GlobalOffset(first, column[None])

    def all_reduce_amax(self, factors: str) -> Callable[[jax.Array], jax.Array]:
        """A function that maps ``max |x|`` of this shard to the maximum of all shards.

        The maximum is over the bits of non-negative floats, so that NaN is the largest.
        """
        axes = self.assignment.axes_of(factors)

        def reduce(amax: jax.Array) -> jax.Array:
            if not axes:
                return amax
            bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axes)
            return lax.bitcast_convert_type(bits, jnp.float32)

        return reduce


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
