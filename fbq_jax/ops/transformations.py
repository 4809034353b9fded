"""Ops under JAX's transformations: ``jit``, ``vmap``, ``grad`` and partitioning."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fbq_jax.kernels import rounding
from fbq_jax.ops import dispatch
from fbq_jax.ops.backends import BACKENDS
from fbq_jax.ops.op import LocalOp, Op
from fbq_jax.sharding.layer_names import record_layer, warn_first
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.partitioning import call_partitioned


def call(
    op: Op,
    operands: tuple[Any, ...],
    options: Mapping[str, Any],
    implementation: str | None,
) -> Any:
    """Calls an op.

    Args:
      op: the record of the op.
      operands: arrays, or trees of arrays.
      options: the op's keyword arguments, which must be hashable.
      implementation: as in ``dispatch.choose``.
    """
    request = op.request(*operands, **options)
    choice = dispatch.choose_for(request, implementation)
    dispatch.warn_of_choice(choice, request, implementation)
    record_layer(op.name, operands)
    has_no_device = jax.default_backend() == "cpu"
    warns = has_no_device and dispatch.is_reference_by_default(choice, implementation)
    backend, has_blocks = BACKENDS[choice.implementation], bool(request.sides)
    run = LocalOp(op, backend, choice.backend, has_blocks, warns_elsewhere=warns)
    return _transformed(run, tuple(sorted(options.items())))(*operands)


@functools.cache
def _transformed(
    run: LocalOp, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The op as a function that JAX can transform.

    Kernels have no batching rule, so this defines one.  Differentiation raises an
    error.  Rounding has derivative 0, so without the error, a second derivative of a
    quantized dot would silently be wrong.
    """
    op = run.op
    rule_of = functools.partial(op.sharding_rule, **dict(options))

    def local(shard: Shard, *operands: Any) -> Any:
        return op.on_shard(run, shard, operands, dict(options))

    def in_xla(shard: Shard, *operands: Any) -> Any:
        assert xla_run is not None
        if xla_run is not run:
            warn_first(
                ("no kernel on several TPUs", op.name),
                f"{op.name} runs as jax.numpy code in this program for several TPUs, "
                "slower than a kernel, because XLA cannot partition kernels: call the "
                "layers in jax.shard_map",
            )
        return op.on_shard(xla_run, shard, operands, dict(options))

    # XLA sums in the dtype of the product, whatever ``reduce`` asks for.
    xla_run = None if dict(options).get("reduce") else run.without_kernel()
    # jit: outside a compiled function, the reference would otherwise compile some sixty
    # programs, one per operation.
    call_op = functools.partial(
        call_partitioned, op.name, rule_of, local, in_xla=in_xla if xla_run else None
    )
    mapped = custom_vmap(jax.jit(call_op))
    mapped.def_vmap(functools.partial(_map, op, mapped))
    transformed = jax.custom_jvp(mapped)
    transformed.defjvp(_no_derivative)
    return transformed


def _map(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """The rule of ``vmap``."""
    if not axis_size:
        return _map_empty(mapped, in_batched, *args)
    map_op = _map_stacked if op.stacks(*args) else _map_in_sequence
    return map_op(op, mapped, axis_size, in_batched, *args)


def _map_stacked(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Merges a mapped axis into the leading one."""
    stack = functools.partial(_stack_operand, op, axis_size)
    stacked = [*map(stack, args, in_batched)]
    record_layer(op.name, stacked)
    out = jax.tree.map(
        lambda x: x.reshape(axis_size, len(x) // axis_size, *x.shape[1:]),
        mapped(*stacked),
    )
    return out, jax.tree.map(lambda _: True, out)


def _stack_operand(op: Op, axis_size: int, operand: Any, batched: Any) -> Any:
    """Merges a mapped axis of an operand into its leading one."""

    def merge(x: jax.Array, batched: bool) -> jax.Array:
        if not batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        return x.reshape(-1, *x.shape[2:])

    return jax.tree.map(merge, *_own_seeds(op, axis_size, operand, batched))


def _own_seeds(op: Op, axis_size: int, operand: Any, batched: Any) -> tuple[Any, Any]:
    """An operand, and which of its arrays are mapped.

    Seeds of which none is mapped become different ones for each example.
    """
    dtypes = {x.dtype for x in jax.tree.leaves(operand)}
    is_seeds = op.seeded and dtypes == {jnp.dtype(jnp.uint32)}
    if is_seeds and not any(jax.tree.leaves(batched)):
        seeds = rounding.fold_seeds(operand)[None]
        index = jnp.expand_dims(jnp.arange(axis_size), range(1, seeds.ndim))
        return rounding.fold(seeds, index), True
    return operand, batched


def _map_empty(
    mapped: Callable[..., Any], in_batched: Sequence[Any], *args: Any
) -> tuple[Any, Any]:
    """Maps an axis of size 0: there is nothing to compute."""

    def example(x: jax.Array, batched: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if batched else x.shape, x.dtype)

    shapes = jax.eval_shape(mapped, *jax.tree.map(example, list(args), [*in_batched]))
    out = jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), shapes)
    return out, jax.tree.map(lambda _: True, out)


def _map_in_sequence(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Runs the op on one example after the other."""
    own = functools.partial(_own_seeds, op, axis_size)
    operands, batched = zip(*map(own, args, in_batched), strict=True)
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(batched)

    def run(examples: list[jax.Array]) -> Any:
        rest = iter(examples)
        pairs = zip(leaves, flags, strict=True)
        every = [next(rest) if is_mapped else x for x, is_mapped in pairs]
        return mapped(*jax.tree.unflatten(tree, every))

    pairs = zip(leaves, flags, strict=True)
    out = lax.map(run, [x for x, is_mapped in pairs if is_mapped])
    return out, jax.tree.map(lambda _: True, out)


def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("a quantized dot has no second derivative")
