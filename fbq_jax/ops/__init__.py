"""The library's ops, as JAX's transformations see them.

Each has the signature of its definition in ``fbq_jax.kernels.reference``,
``producers`` or ``ragged``, and ``implementation``, which ``dispatch.choose`` takes.
Around what that chooses are the rules of the partitioner (``fbq_jax.sharding``) and of
``vmap``; there is no derivative.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fbq_jax.kernels import rounding
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.rounding import Rounding
from fbq_jax.ops import dispatch
from fbq_jax.ops.dispatch import Choice
from fbq_jax.sharding import local_ops
from fbq_jax.sharding.collectives import BLOCK
from fbq_jax.sharding.op_rules import one_scale_a_row


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """``reference.quantize`` by the implementation chosen."""
    choice = dispatch.choose("quantize", block, implementation=implementation)
    return _batched(choice, block, block=block, rowwise=rowwise, colwise=colwise)(
        x, seeds
    )


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    bound: float = 127.0,
    per_tensor: bool = False,
    implementation: str | None = None,
) -> Layouts:
    """``reference.quantize_vectors`` by the implementation chosen.

    Of ``[B, P, R, C]`` with seeds ``[B, P]`` each of the P parts of a matrix has scales
    and noise of its own; the codes by columns are ``[B, P, C, R]``.
    """
    choice = dispatch.choose("quantize_vectors", (), implementation=implementation)
    return _batched(
        choice, (), rowwise=rowwise, colwise=colwise, bound=bound, per_tensor=per_tensor
    )(x, seeds)


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> FallbackQuantized:
    """``reference.quantize_fallback`` by the implementation chosen."""
    choice = dispatch.choose("quantize_fallback", block, implementation=implementation)
    options = {"block": block, "criterion": criterion, "colwise": colwise}
    return _batched(choice, block, **options)(x, theta, seeds)


def block_metric(
    x: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    implementation: str | None = None,
) -> jax.Array:
    """``reference.block_metric`` by the implementation chosen."""
    choice = dispatch.choose("block_metric", block, implementation=implementation)
    return _batched(choice, block, block=block, criterion=criterion)(x)


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    reduce: str | None = None,
    seeds: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``reference.matmul`` by the implementation chosen.

    Over several devices it is summed as ``reduce`` says, as in ``Gemm``; in INT8 with
    the noise of ``seeds``, uint32 ``[B]``.

    Operands by columns in the parts of ``quantize_vectors`` are contracted over those,
    too, in float32.

    Raises:
      ValueError: a sum in INT8 has no seeds, or another one has.
    """
    if (reduce == "int8") != (seeds is not None):
        raise ValueError(
            "matmul takes seeds for reduce='int8', and for nothing else; got "
            f"reduce={reduce!r} with{'out' if seeds is None else ''} seeds"
        )
    vectors = residual is None and one_scale_a_row(rhs, block_shape)
    sides = () if vectors else block_shape
    choice = dispatch.choose("matmul", sides, implementation=implementation)
    if 0 in (*lhs.codes.shape, *rhs.codes.shape):
        # No kernel starts for nothing.
        choice = dispatch.choose("matmul", sides, implementation="reference")
    options = {"block_shape": block_shape, "dtype": jnp.dtype(dtype), "reduce": reduce}
    operands = lhs, residual, rhs, *(() if seeds is None else (seeds,))
    return _batched(choice, sides, **options)(*operands)


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """``ragged.ragged_matmul``, which is all there is."""
    options = {"block_shape": block_shape, "dtype": jnp.dtype(dtype)}
    op = _without_kernels("ragged_matmul", block_shape, implementation, **options)
    return op(lhs, residual, rhs, groups)


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """``ragged.ragged_contraction``, which is all there is."""
    options = {"size": size, "block_shape": block_shape, "dtype": jnp.dtype(dtype)}
    op = _without_kernels("ragged_contraction", block_shape, implementation, **options)
    return op(lhs, rhs, groups)


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> NormQuantized:
    """``producers.rms_norm_quantize`` by the implementation chosen."""
    choice = dispatch.choose(
        "rms_norm_quantize", block, width=x.shape[2], implementation=implementation
    )
    return _batched(
        choice,
        block,
        epsilon=epsilon,
        bits=bits,
        block=block,
        criterion=criterion,
        colwise=colwise,
    )(x, norm_scale, theta, seeds)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> GateQuantized:
    """``producers.silu_gate_quantize`` by the implementation chosen."""
    choice = dispatch.choose(
        "silu_gate_quantize",
        block,
        width=gate_up.shape[2] // 2,
        implementation=implementation,
    )
    return _batched(
        choice, block, bits=bits, block=block, criterion=criterion, colwise=colwise
    )(gate_up, theta, seeds)


def silu_gate_grad_quantize(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """``producers.silu_gate_grad_quantize`` by the implementation chosen."""
    choice = dispatch.choose(
        "silu_gate_grad_quantize",
        block,
        width=dy.shape[2],
        implementation=implementation,
    )
    return _batched(
        choice, block, bits=bits, block=block, rowwise=rowwise, colwise=colwise
    )(dy, by_gate, by_up, seeds)


def _batched(
    choice: Choice, sides: Sequence[int], **options: Any
) -> Callable[..., Any]:
    dispatch.warn_of_reference(choice)
    return _batched_op(choice, tuple(sides), tuple(options.items()))


def _without_kernels(
    op: str, sides: Sequence[int], implementation: str | None, **options: Any
) -> Callable[..., Any]:
    """The definition of a ragged op."""
    choice = dispatch.choose(op, sides, implementation=implementation)
    dispatch.warn_of_reference(choice)
    return _ragged_op(op, tuple(options.items()))


@functools.cache
def _ragged_op(op: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A ragged op as JAX's transformations see it; under ``vmap`` it is not cut."""
    function = dispatch.definition(op)
    mapped = custom_vmap(local_ops.sharded_ragged(op, function, dict(options)))

    @mapped.def_vmap
    def _rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, list(in_batched))
        run = functools.partial(function, **dict(options))
        return jax.vmap(run, axes, axis_size=axis_size)(*args), True

    return mapped


def _on_one_device(
    choice: Choice, sides: Sequence[int], *args: Any, **options: Any
) -> Any:
    """An op by the implementation chosen."""
    run = functools.partial(dispatch.function_of(choice, sides), **options)
    if choice.implementation == "reference":
        return run(*args)
    # What runs on this machine's CPU cannot use a kernel.
    on_cpu = functools.partial(dispatch.definition(choice.op), **options)
    return lax.platform_dependent(*args, cpu=on_cpu, default=run)


@functools.cache
def _batched_op(
    choice: Choice, sides: tuple[int, ...], options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """An op as JAX's transformations see it.

    ``vmap`` stacks into the leading axis that every op has: kernels have no batching
    rule of their own.  The seeds of a mapped axis are made to differ, as those of the
    leading axis do, so that mapped examples draw noise of their own.

    There is no derivative.  Rounding's own is 0, which would pass for an answer where
    the gradient of a quantized dot is differentiated once more.
    """
    quantize = None
    if dict(options).get("reduce") == "int8":
        to_codes = choice._replace(op="quantize")
        quantize = functools.partial(_on_one_device, to_codes, BLOCK)
    run = functools.partial(_on_one_device, choice, sides)
    # Compiled as a whole even where the caller is not: op by op, the reference would
    # compile some sixty programs.
    compiled = jax.jit(local_ops.sharded(choice.op, run, dict(options), quantize))
    mapped = custom_vmap(compiled)

    @mapped.def_vmap
    def _rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        def stack(x: jax.Array, batched: bool) -> jax.Array:
            if not batched:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
                if x.dtype == jnp.uint32:
                    index = jnp.arange(axis_size)
                    x = rounding.fold(x, jnp.expand_dims(index, range(1, x.ndim)))
            return x.reshape(-1, *x.shape[2:])

        stacked = jax.tree.map(stack, list(args), list(in_batched))
        out = mapped(*stacked)
        out = jax.tree.map(
            lambda x: x.reshape(axis_size, len(x) // axis_size, *x.shape[1:]), out
        )
        return out, jax.tree.map(lambda _: True, out)

    op_function = jax.custom_jvp(mapped)

    @op_function.defjvp
    def _no_derivative(*_: Any) -> Any:
        raise NotImplementedError("a quantized dot has no second derivative")

    return op_function
