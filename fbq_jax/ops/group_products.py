"""The op of the gradients of experts' weights: ``contract``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.kernels.quantized import Quantized, product_block
from fbq_jax.ops.op import LocalOp, Op, call, register
from fbq_jax.ops.problems import lead_of, map_problems
from fbq_jax.ops.products import local_groups, operand_words, product_request
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import UNSHARDED_AXIS, ShardingRule, block_axis


def contract(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """Contracts the rows of tiles, and sums by group; see ``reference.contract``."""
    options = {"dtype": jnp.dtype(dtype), "size": size}
    dw: jax.Array = call(CONTRACT, (lhs, rhs, groups), options, implementation)
    return dw


def _rule(
    lhs: Quantized, rhs: Quantized, groups: jax.Array, **_options: Any
) -> ShardingRule:
    k, _, n = product_block(lhs, rhs)
    rows, lead = block_axis("k", lhs.shape[-2], k or 1), lead_of(groups)
    columns = block_axis("n", rhs.shape[-2], n or 1)
    left = operand_words(lhs, rows, UNSHARDED_AXIS, f"{lead}t")
    right = operand_words(rhs, columns, UNSHARDED_AXIS, f"{lead}t")
    result = f"{lead[:2]}e {rows.codes} {columns.codes}"
    return ShardingRule((left, right, f"{lead}t"), result, f"{lead[2:3]}t")


def _on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Sums the products of this device's tiles, for this device's groups."""
    *_, groups = operands
    size = options["size"] // shard.shard_count("e")
    groups = local_groups(groups, size, shard)

    def contract(*operands: Any) -> jax.Array:
        return run(*operands[:-1], **options | {"size": size})

    part = map_problems(contract, (*operands[:2], groups))
    if groups.ndim == 3:  # the copies of a part have the same groups
        part = jnp.sum(part, axis=1)
    return shard.sum(part)


CONTRACT = register(
    Op(
        "contract",
        functools.partial(product_request, op="contract"),
        _rule,
        _on_shard,
        stacks=lambda *_: False,
    )
)
