"""The op that sets and moves delay thresholds."""

from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.kernels import threshold_reference
from fbq_jax.kernels.threshold_reference import MovedThreshold
from fbq_jax.ops.dispatch import Request
from fbq_jax.ops.op import LocalOp, Op, call, register
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import ShardingRule

# The axes of the blocks of stacks of matrices, whose rows may be two axes.
_BLOCK_AXES = {1: "b", 2: "b j", 3: "b i j", 4: "b p i j", 5: "b p g i j"}


def _rule(
    metric: jax.Array, _scales: jax.Array, *scalars: jax.Array, **_options: Any
) -> ShardingRule:
    blocks: Any = _BLOCK_AXES[metric.ndim]
    results: Any = MovedThreshold
    words = jax.tree.map(lambda _: "b", scalars)
    operands = blocks, blocks, *words
    return ShardingRule(operands, results("b", "b", "b", "b", blocks))


def _on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> MovedThreshold:
    """Gathers the metrics of all blocks, and selects the residuals of its own."""
    if not shard.is_sharded("pgij"):
        return run(*operands, **options)
    metric, residual_scales, *others = operands
    every_metric = shard.gather(metric, "pgij", axis=1)
    moved = run(every_metric, every_metric, *others, **options)
    falls_back = threshold_reference.exceeds(metric, moved.theta)
    selected = jnp.where(falls_back, residual_scales, 0.0)
    return moved._replace(residual_scales=selected)


def move_threshold(
    *operands: jax.Array | None, implementation: str | None = None, **options: Any
) -> MovedThreshold:
    """Sets and moves thresholds; see ``threshold_reference.move_threshold``."""
    moved: MovedThreshold = call(MOVE_THRESHOLD, operands, options, implementation)
    return moved


MOVE_THRESHOLD = register(
    Op(
        "move_threshold",
        lambda *_, **__: Request("move_threshold", ()),
        _rule,
        _on_shard,
        seeded=False,
    )
)
