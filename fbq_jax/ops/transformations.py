"""How JAX's transformations see an op: ``jit``, ``vmap``, ``grad`` and partitioning."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from fbq_jax.kernels import rounding
from fbq_jax.ops import dispatch
from fbq_jax.ops.op import LocalOp, Op
from fbq_jax.sharding.layer_names import record_layer
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.partitioning import partitioned


def call(
    op: Op,
    operands: tuple[Any, ...],
    block_shape: Sequence[int],
    /,
    *,
    width: int | None = None,
    implementation: str | None,
    **options: Any,
) -> Any:
    """Calls an op.

    Args:
      op: its record.
      operands: arrays, or trees of arrays.
      block_shape: what ``dispatch.choose`` takes as ``sides``.
      width: as ``dispatch.choose`` takes it.
      implementation: as ``dispatch.choose`` takes it.
      options: the op's keyword arguments, which are hashable.
    """
    choice = dispatch.choose(
        op.name, block_shape, width=width, implementation=implementation
    )
    dispatch.warn_of_reference(choice, block_shape)
    record_layer(op.name, operands)
    run = LocalOp(op, choice.implementation, tuple(block_shape))
    return _transformed(run, tuple(options.items()))(*operands)


@functools.cache
def _transformed(
    run: LocalOp, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The op as JAX's transformations see it.

    Kernels have no batching rule, so ``vmap`` has one here.  There is no derivative:
    that of rounding is 0, which would pass for an answer where the gradient of a
    quantized dot is differentiated once more.
    """
    op = run.op
    rule_of = functools.partial(op.sharding_rule, **dict(options))
    local = functools.partial(_on_shard, run, options)
    # Compiled as a whole even where the caller is not: op by op, the reference would
    # compile some sixty programs.
    mapped = custom_vmap(jax.jit(partitioned(op.name, rule_of, local)))
    if op.stacks:
        mapped.def_vmap(functools.partial(_map_stacked, op.name, mapped))
    else:
        reference = functools.partial(op.reference, **dict(options))
        mapped.def_vmap(functools.partial(_map_reference, reference))
    transformed = jax.custom_jvp(mapped)
    transformed.defjvp(_no_derivative)
    return transformed


def _on_shard(
    run: LocalOp, options: tuple[tuple[str, Any], ...], shard: Shard
) -> Callable[..., Any]:
    """The function of one device's operands."""

    def local(*operands: Any) -> Any:
        return run.op.on_shard(run, shard, operands, dict(options))

    return local


def _map_stacked(
    name: str,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Stacks a mapped axis into the leading one.

    Seeds that are not mapped are made to differ, so that mapped examples draw different
    noise.
    """

    def stack(x: jax.Array, batched: bool) -> jax.Array:
        if not batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
            if x.dtype == jnp.uint32:
                index = jnp.arange(axis_size)
                x = rounding.fold(x, jnp.expand_dims(index, range(1, x.ndim)))
        return x.reshape(-1, *x.shape[2:])

    stacked = jax.tree.map(stack, list(args), list(in_batched))
    record_layer(name, stacked)
    out = jax.tree.map(
        lambda x: x.reshape(axis_size, len(x) // axis_size, *x.shape[1:]),
        mapped(*stacked),
    )
    return out, jax.tree.map(lambda _: True, out)


def _map_reference(
    reference: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Maps the reference, which is not partitioned."""
    axes = jax.tree.map(lambda batched: 0 if batched else None, list(in_batched))
    out = jax.vmap(reference, axes, axis_size=axis_size)(*args)
    return out, jax.tree.map(lambda _: True, out)


def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("a quantized dot has no second derivative")
