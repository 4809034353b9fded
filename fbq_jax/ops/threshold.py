"""The op that sets and moves delay thresholds."""

from typing import Any

import jax

from fbq_jax.kernels import threshold_reference
from fbq_jax.kernels.threshold_reference import MovedThreshold
from fbq_jax.ops.backends import nvidia_refusal, triton_kernels
from fbq_jax.ops.transformations import define_op
from fbq_jax.sharding.rule_language import ShardingRule


def _rule(*_operands: jax.Array, **_options: Any) -> ShardingRule:
    """Every device needs the metrics of all blocks, which are few."""
    blocks: Any = "b ."
    results: Any = MovedThreshold
    return ShardingRule((blocks, blocks, "b", "b", "b"), results("b", "b", "b", blocks))


move_threshold = define_op(
    threshold_reference.move_threshold,
    _rule,
    lambda run, shard, operands, options: shard.run(run, operands, **options),
    kernels=triton_kernels("fbq_jax.kernels.triton.threshold", refusal=nvidia_refusal),
)
