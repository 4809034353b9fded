"""Ops under JAX's transformations: ``jit``, ``vmap``, ``grad`` and partitioning."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fbq_jax.kernels import rounding
from fbq_jax.kernels.reference import CodeDtype
from fbq_jax.ops import dispatch
from fbq_jax.ops.op import LocalOp, Op, register
from fbq_jax.sharding.layer_names import record_layer, warn_first
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.partitioning import call_partitioned

Results = TypeVar("Results")


def define_op(
    reference: Callable[..., Results], *fields: Any, **named_fields: Any
) -> Callable[..., Results]:
    """Registers an op and returns the function that calls it.

    The function takes what the reference takes, plus ``implementation``.  It does not
    take what ``on_shard`` adds, such as ``global_offset``.

    Args:
      reference: the definition of the op.
      *fields: the next fields of ``Op``.
      **named_fields: further fields of ``Op``.
    """
    op = Op(reference, *fields, **named_fields)
    register(op)

    @functools.wraps(reference)
    def function(
        *operands: Any, implementation: str | None = None, **options: Any
    ) -> Results:
        block_shape = options.get("block") or options.get("block_shape", ())
        results: Results = call(op, operands, block_shape, options, implementation)
        return results

    return function


def call(
    op: Op,
    operands: tuple[Any, ...],
    block_shape: Sequence[int],
    options: Mapping[str, Any],
    implementation: str | None,
) -> Any:
    """Calls an op.

    Args:
      op: the record of the op.
      operands: arrays, or trees of arrays.
      block_shape: the shape of a block, as in ``dispatch.choose``.
      options: the op's keyword arguments, which must be hashable.
      implementation: as in ``dispatch.choose``.
    """
    # An op makes codes, or has them as operands.
    dtypes = options.get("dtype"), *(x.dtype for x in jax.tree.leaves(operands))
    codes: CodeDtype = "float8_e4m3fn" if "float8_e4m3fn" in dtypes else "int8"
    choice = dispatch.choose(
        op.name, block_shape, codes=codes, implementation=implementation
    )
    dispatch.warn_of_reference(choice, block_shape, codes, implementation)
    dispatch.warn_of_small_blocks(choice, block_shape)
    if op.packed_width is not None:
        width = op.packed_width(operands)
        dispatch.warn_of_two_passes(choice, block_shape, width, implementation)
        dispatch.warn_of_packing()
    record_layer(op.name, operands)
    has_no_device = jax.default_backend() == "cpu"
    warns = has_no_device and dispatch.is_reference_by_default(choice, implementation)
    run = LocalOp(op, choice.implementation, tuple(block_shape), warns_elsewhere=warns)
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
    if op.stacks:
        mapped.def_vmap(functools.partial(_map_stacked, op, mapped))
    else:
        mapped.def_vmap(functools.partial(_map_in_sequence, op, mapped))
    transformed = jax.custom_jvp(mapped)
    transformed.defjvp(_no_derivative)
    return transformed


def _map_stacked(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Merges a mapped axis into the leading one."""
    if not axis_size:
        return _map_empty(mapped, in_batched, *args)
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
    if not axis_size:
        return _map_empty(mapped, in_batched, *args)
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
