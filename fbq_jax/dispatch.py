"""Which implementation of an op runs here, and why.

An op has one signature, that of ``fbq_jax.kernels.reference`` or ``producers``, and
several implementations:

========= =======================================================================
mosaic    for Hopper: the GEMM in Pallas Mosaic GPU, the rest as in triton
triton    for NVIDIA GPUs from Ampere on, through jax-triton
reference anywhere: the definition
========= =======================================================================

Where every row of lhs and of rhs has one scale, the first two leave the product to
XLA's own INT8 GEMM.  Ragged products have the reference only.

The first that can serve a call does.  ``implementation=``, or else
``FBQ_IMPLEMENTATION`` in the environment (read when a function is traced), asks for
one; a call that it cannot serve says why.
"""

import functools
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fbq_jax import sharding
from fbq_jax.kernels import packing, producers, ragged, reference, rounding, xla
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.producers import GateQuantized, NormQuantized
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.rounding import Rounding
from fbq_jax.reduce import BLOCK

ENVIRONMENT_VARIABLE = "FBQ_IMPLEMENTATION"
PRODUCERS = (
    "rms_norm_quantize",
    "silu_gate_quantize",
    "silu_gate_grad_quantize",
)
OPS = (
    "quantize",
    "quantize_vectors",
    "quantize_fallback",
    "block_metric",
    "matmul",
    *PRODUCERS,
)
WITHOUT_KERNELS = ("ragged_matmul", "ragged_contraction")
IMPLEMENTATIONS = ("mosaic", "triton", "reference")
_SIDES = (32, 64, 128, 256)


class Choice(NamedTuple):
    """The implementation of an op that runs here, and the reason in words."""

    op: str
    implementation: str
    reason: str


def choose(
    op: str,
    sides: Sequence[int],
    *,
    width: int | None = None,
    implementation: str | None = None,
) -> Choice:
    """Chooses the implementation of an op for JAX's default backend.

    Args:
      op: one of ``OPS`` or ``WITHOUT_KERNELS``.
      sides: of the blocks; none where a scale is of a whole row or column.
      width: of ``PRODUCERS``, the length of the rows of what is packed; None for one
        that fits.
      implementation: the one to take; by default what ``FBQ_IMPLEMENTATION`` says, or
        the first that can serve the call.

    Raises:
      ValueError: if there is no op or no implementation of that name, or it cannot
        serve the call.

    >>> choose("matmul", (128, 128, 128), implementation="reference").reason
    'implementation= asks for it'
    """
    ops = (*OPS, *WITHOUT_KERNELS)
    if op not in ops:
        raise ValueError(f"{op!r} is not an op; there are: {', '.join(ops)}")
    source = "implementation"
    if implementation is None and (asked := os.environ.get(ENVIRONMENT_VARIABLE)):
        source, implementation = ENVIRONMENT_VARIABLE, asked
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"{source}={implementation!r} is not an implementation; "
                f"there are: {', '.join(IMPLEMENTATIONS)}"
            )
        if reason := _refusal(implementation, op, sides):
            raise ValueError(f"{source}={implementation} cannot do {op}: {reason}")
        reason = f"{source}= asks for it"
        return Choice(
            op, implementation, reason + _passes(implementation, op, sides, width)
        )
    refusals = []
    for name in IMPLEMENTATIONS:
        reason = _refusal(name, op, sides)
        if reason is None:
            break
        refusals.append(f"not {name}: {reason}")
    reason = "; ".join(refusals) or "the first choice on this GPU"
    return Choice(op, name, reason + _passes(name, op, sides, width))


def _refusal(implementation: str, op: str, sides: Sequence[int]) -> str | None:
    """Why an implementation cannot serve a call, or None if it can."""
    if implementation == "reference":
        return None
    if op in WITHOUT_KERNELS:
        return "it has no kernel for this op"
    backend = jax.default_backend()
    if backend != "gpu":
        return f"it needs a GPU, and JAX's default backend is {backend}"
    capability = _capability()
    if capability is None or capability < 80:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is missing: pip install 'fbq-jax[cuda]'"
    if not all(side in _SIDES for side in sides):
        return f"its blocks have sides of {_SIDES}, not {tuple(sides)}"
    if implementation == "mosaic" and op == "matmul":
        if capability != 90:
            return "it needs a Hopper GPU, of compute capability 9.0"
        if not all(side % 128 == 0 for side in sides):
            return f"its blocks have sides of 128 or 256, not {tuple(sides)}"
    return None


def _passes(
    implementation: str, op: str, sides: Sequence[int], width: int | None
) -> str:
    """What a reason adds where a kernel does not do all of an op in one pass."""
    group = packing.GROUP
    if implementation == "reference" or op not in PRODUCERS:
        return ""
    if sides[1] == group and (width is None or width % group == 0):
        return ""
    return (
        f"; not in one pass, but by its definition and a kernel that quantizes: one "
        f"pass takes blocks {group} wide and rows of whole blocks, not blocks "
        f"{sides[1]} wide" + ("" if width is None else f" and rows of {width}")
    )


def _capability() -> int | None:
    """The first GPU's compute capability, times ten; None if it is not NVIDIA's."""
    digits = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")
    if len(digits) != 2 or not all(digit.isdecimal() for digit in digits):
        return None
    return 10 * int(digits[0]) + int(digits[1])


def _function(choice: Choice, sides: Sequence[int]) -> Callable[..., Any]:
    """An implementation's function.  Only modules that are used are imported."""
    module: ModuleType
    if choice.implementation == "reference":
        module = _definitions(choice.op)
    elif choice.op in PRODUCERS:
        from fbq_jax.kernels.triton import producers as module
    elif choice.op == "quantize_vectors":
        from fbq_jax.kernels.triton import vectors as module
    elif choice.op != "matmul":
        from fbq_jax.kernels.triton import quantize as module
    elif not sides:
        module = xla
    elif choice.implementation == "mosaic":
        from fbq_jax.kernels.mosaic import matmul as module
    else:
        from fbq_jax.kernels.triton import matmul as module
    return getattr(module, choice.op)


def _definitions(op: str) -> ModuleType:
    return producers if op in PRODUCERS else reference


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rows: Rounding | None,
    columns: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """``reference.quantize`` by the implementation chosen."""
    choice = choose("quantize", block, implementation=implementation)
    return _batched(choice, block, block=block, rows=rows, columns=columns)(x, seeds)


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rows: Rounding | None,
    columns: Rounding | None,
    bound: float = 127.0,
    per_tensor: bool = False,
    implementation: str | None = None,
) -> Layouts:
    """``reference.quantize_vectors`` by the implementation chosen."""
    choice = choose("quantize_vectors", (), implementation=implementation)
    return _batched(
        choice, (), rows=rows, columns=columns, bound=bound, per_tensor=per_tensor
    )(x, seeds)


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    columns: Rounding | None,
    implementation: str | None = None,
) -> FallbackQuantized:
    """``reference.quantize_fallback`` by the implementation chosen."""
    choice = choose("quantize_fallback", block, implementation=implementation)
    options = {"block": block, "criterion": criterion, "columns": columns}
    return _batched(choice, block, **options)(x, theta, seeds)


def block_metric(
    x: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    implementation: str | None = None,
) -> jax.Array:
    """``reference.block_metric`` by the implementation chosen."""
    choice = choose("block_metric", block, implementation=implementation)
    return _batched(choice, block, block=block, criterion=criterion)(x)


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    blocks: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    reduce: str = "float32",
    seeds: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``reference.matmul`` by the implementation chosen.

    Over several devices it is summed as ``reduce`` says, as in ``Gemm``; in INT8 with
    the noise of ``seeds``, uint32 ``[B]``.

    Raises:
      ValueError: a sum in INT8 has no seeds, or another one has.
    """
    if (reduce == "int8") != (seeds is not None):
        raise ValueError(
            "matmul takes seeds for reduce='int8', and for nothing else; got "
            f"reduce={reduce!r} with{'out' if seeds is None else ''} seeds"
        )
    one_scale_a_row = residual is None and blocks == (
        1,
        math.prod(rhs.codes.shape[2:]),
        1,
    )
    sides = () if one_scale_a_row else blocks
    choice = choose("matmul", sides, implementation=implementation)
    if 0 in (*lhs.codes.shape, *rhs.codes.shape):
        # No kernel starts for nothing.
        choice = choose("matmul", sides, implementation="reference")
    options = {"blocks": blocks, "dtype": jnp.dtype(dtype), "reduce": reduce}
    operands = lhs, residual, rhs, *(() if seeds is None else (seeds,))
    return _batched(choice, sides, **options)(*operands)


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    blocks: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """``ragged.ragged_matmul``, which is all there is."""
    options = {"blocks": blocks, "dtype": jnp.dtype(dtype)}
    op = _without_kernels("ragged_matmul", blocks, implementation, **options)
    return op(lhs, residual, rhs, groups)


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    blocks: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """``ragged.ragged_contraction``, which is all there is."""
    options = {"size": size, "blocks": blocks, "dtype": jnp.dtype(dtype)}
    op = _without_kernels("ragged_contraction", blocks, implementation, **options)
    return op(lhs, rhs, groups)


def rms_norm_quantize(
    x: jax.Array,
    gain: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    columns: Rounding | None,
    implementation: str | None = None,
) -> NormQuantized:
    """``producers.rms_norm_quantize`` by the implementation chosen."""
    choice = choose(
        "rms_norm_quantize", block, width=x.shape[2], implementation=implementation
    )
    return _batched(
        choice,
        block,
        epsilon=epsilon,
        bits=bits,
        block=block,
        criterion=criterion,
        columns=columns,
    )(x, gain, theta, seeds)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    columns: Rounding | None,
    implementation: str | None = None,
) -> GateQuantized:
    """``producers.silu_gate_quantize`` by the implementation chosen."""
    choice = choose(
        "silu_gate_quantize",
        block,
        width=gate_up.shape[2] // 2,
        implementation=implementation,
    )
    return _batched(
        choice, block, bits=bits, block=block, criterion=criterion, columns=columns
    )(gate_up, theta, seeds)


def silu_gate_grad_quantize(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rows: Rounding | None,
    columns: Rounding | None,
    implementation: str | None = None,
) -> Layouts:
    """``producers.silu_gate_grad_quantize`` by the implementation chosen."""
    choice = choose(
        "silu_gate_grad_quantize",
        block,
        width=dy.shape[2],
        implementation=implementation,
    )
    return _batched(choice, block, bits=bits, block=block, rows=rows, columns=columns)(
        dy, by_gate, by_up, seeds
    )


def _batched(
    choice: Choice, sides: Sequence[int], **options: Any
) -> Callable[..., Any]:
    if choice.implementation == "reference" and jax.default_backend() == "gpu":
        _warn_of_reference(choice)
    return _batched_op(choice, tuple(sides), tuple(options.items()))


def _without_kernels(
    op: str, sides: Sequence[int], implementation: str | None, **options: Any
) -> Callable[..., Any]:
    """The definition of a ragged op."""
    choice = choose(op, sides, implementation=implementation)
    if jax.default_backend() == "gpu":
        _warn_of_reference(choice)
    return _ragged_op(op, tuple(options.items()))


@functools.cache
def _ragged_op(op: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A ragged op as JAX's transformations see it; under ``vmap`` it is not cut."""
    function = getattr(ragged, op)
    mapped = custom_vmap(sharding.sharded_ragged(op, function, dict(options)))

    @mapped.def_vmap
    def _rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, list(in_batched))
        run = functools.partial(function, **dict(options))
        return jax.vmap(run, axes, axis_size=axis_size)(*args), True

    return mapped


@functools.cache
def _warn_of_reference(choice: Choice) -> None:
    """Says once that a GPU runs the slow definition, unless that was asked for."""
    if "asks for it" not in choice.reason:
        warnings.warn(
            f"{choice.op} runs by its definition in jax.numpy on this GPU, many times "
            f"slower than by a kernel: {choice.reason}",
            stacklevel=2,
        )


def _on_one_device(
    choice: Choice, sides: Sequence[int], *args: Any, **options: Any
) -> Any:
    """An op by the implementation chosen."""
    run = functools.partial(_function(choice, sides), **options)
    if choice.implementation == "reference":
        return run(*args)
    # What runs on this machine's CPU cannot use a kernel.
    definition = getattr(_definitions(choice.op), choice.op)
    definition = functools.partial(definition, **options)
    return lax.platform_dependent(*args, cpu=definition, default=run)


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
    compiled = jax.jit(sharding.sharded(choice.op, run, dict(options), quantize))
    mapped = custom_vmap(compiled)

    @mapped.def_vmap
    def _rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        def stack(x: jax.Array, batched: bool) -> jax.Array:
            if not batched:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
                if x.dtype == jnp.uint32:
                    x = rounding.fold(x, jnp.arange(axis_size)[:, None])
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
