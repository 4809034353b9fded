"""Layers whose output is only read by quantization, as ops of one pass.

A norm or a gate before a linear layer, or a gate's gradient before the gradients of
one, writes floats that nothing but quantization reads.  Each op here is the layer and
the quantization of its output in one: codes and scales come out, with what the layer
saves for its backward pass, and no floats.

An op is defined as the composition of the layer and ``reference``'s quantization; an
implementation that cannot fuse the two is the same composition with a quantization of
its own (``ops``).  A layer computes in float32, and its output is rounded once to its
dtype before it is quantized.
Operands are stacks of matrices ``[B, R, C]``, as in ``reference``.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import packing, reference
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Block, Criterion, Layouts, Quantized
from fbq_jax.kernels.rounding import GlobalOffset, Rounding


class Operand(NamedTuple):
    """``reference.FallbackQuantized``, or what is left of it without a criterion.

    Then ``residual`` is None and ``metric`` is ``[B, 0, 0]``.
    """

    main: Quantized
    residual: Quantized | None
    metric: jax.Array
    colwise: Quantized | None


class NormQuantized(NamedTuple):
    """A norm's output, quantized, and what its backward pass reads.

    ``normalized`` are the packed codes of ``x * rstd``; ``rstd`` is float32
    ``[B, R, 1]``.
    """

    operand: Operand
    normalized: Packed
    rstd: jax.Array


class GateQuantized(NamedTuple):
    """A gate's output, quantized, and the packed factors of its gradients."""

    operand: Operand
    by_gate: Packed
    by_up: Packed


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
    global_offset: GlobalOffset | None = None,
    ops: ModuleType = reference,
) -> NormQuantized:
    """Quantizes ``x / sqrt(mean(x**2) + epsilon) * gain``, the means over rows.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      norm_scale: float32 ``[B, C]``.
      theta: float32 ``[B]``; see ``reference.quantize_fallback``.
      seeds: uint32 ``[B]``; likewise.
      epsilon: added to the mean square.
      bits: of each code of ``normalized``, 4 to 12.
      block: rows and columns of a block.
      criterion: of fallback; None for nearest codes alone.
      colwise: the rounding of the codes by columns; None for no such codes.
      global_offset: where the output lies in a larger one, which the noise is that of.
      ops: who quantizes: a module with the ops of ``reference``.
    """
    wide = x.astype(jnp.float32)
    rstd = find_rstd(jnp.mean(wide * wide, axis=-1, keepdims=True), epsilon)
    y = _round(apply_norm(wide, rstd, norm_scale[:, None, :]), x.dtype)
    operand = _quantize(ops, y, theta, seeds, block, criterion, colwise, global_offset)
    return NormQuantized(operand, packing.quantize(wide * rstd, bits), rstd)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
    ops: ModuleType = reference,
) -> GateQuantized:
    """Quantizes ``silu(gate) * up``.

    Args:
      gate_up: bfloat16, float16 or float32 ``[B, R, 2 F]``, of ``join_gate_up``.
      theta: float32 ``[B]``; see ``reference.quantize_fallback``.
      seeds: uint32 ``[B]``; likewise.
      bits: of each code of the factors, 4 to 12.
      block: rows and columns of a block of the output ``[B, R, F]``.
      criterion: of fallback; None for nearest codes alone.
      colwise: the rounding of the codes by columns; None for no such codes.
      global_offset: where the output lies in a larger one, which the noise is that of.
      ops: who quantizes: a module with the ops of ``reference``.
    """
    gate, up = split_gate_up(gate_up)
    slope, value = silu_factors(gate, up)
    y = _round(value * up.astype(jnp.float32), gate_up.dtype)
    operand = _quantize(ops, y, theta, seeds, block, criterion, colwise, global_offset)
    by_gate, by_up = (packing.quantize(factor, bits) for factor in (slope, value))
    return GateQuantized(operand, by_gate, by_up)


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
    global_offset: GlobalOffset | None = None,
    ops: ModuleType = reference,
) -> Layouts:
    """Quantizes the gradient of ``gate_up``: dy times each factor.

    Args:
      dy: bfloat16, float16 or float32 ``[B, R, F]``.
      by_gate: of ``silu_gate_quantize``.
      by_up: likewise.
      seeds: uint32 ``[B]``, of the noise.
      bits: of each code of the factors.
      block: rows and columns of a block of the gradient ``[B, R, 2 F]``.
      rowwise: the rounding of the codes by rows; None for no such codes.
      colwise: likewise, by columns.
      global_offset: where the output lies in a larger one, which the noise is that of.
      ops: who quantizes: a module with the ops of ``reference``.
    """
    halves = [times_packed(dy, factor, bits) for factor in (by_gate, by_up)]
    quantized: Layouts = ops.quantize(
        join_gate_up(*halves),
        seeds,
        block=block,
        rowwise=rowwise,
        colwise=colwise,
        global_offset=global_offset,
    )
    return quantized


def join_gate_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Two ``[..., F]`` as one ``[..., 2 F]``, in which they take turns.

    By 128 columns, so that a part of the whole, on one device, has both; all of the
    gate and then all of up where F is no multiple of that.
    """
    *lead, size = gate.shape
    shape = (*lead, *_turns(size))
    pairs = jnp.stack([gate.reshape(shape), up.reshape(shape)], axis=-2)
    return pairs.reshape(*lead, 2 * size)


def split_gate_up(gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two of ``join_gate_up``."""
    *lead, both = gate_up.shape
    turns, group = _turns(both // 2)
    pairs = gate_up.reshape(*lead, turns, 2, group)
    gate, up = (pairs[..., i, :].reshape(*lead, both // 2) for i in range(2))
    return gate, up


def _turns(size: int) -> tuple[int, int]:
    if size % packing.GROUP:
        return 1, size
    return size // packing.GROUP, packing.GROUP


def mean_square_rstd(x: jax.Array, epsilon: float) -> jax.Array:
    """``1 / sqrt(mean(x**2) + epsilon)`` of each row: float32 ``[B, R, 1]``."""
    wide = x.astype(jnp.float32)
    return find_rstd(jnp.mean(wide * wide, axis=-1, keepdims=True), epsilon)


def find_rstd(variance: jax.Array, epsilon: float) -> jax.Array:
    """``1 / sqrt(variance + epsilon)``."""
    return lax.rsqrt(variance + epsilon)


def apply_norm(
    x: jax.Array, rstd: jax.Array, norm_scale: jax.Array | None
) -> jax.Array:
    """``x * rstd * gain`` in float32 and in Flax's order, for its results."""
    return x * rstd if norm_scale is None else x * (rstd * norm_scale)


def silu_factors(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the gradient of ``silu(gate) * up`` is multiplied by, in float32.

    Returns:
      For the gate's gradient, ``up * silu'(gate)``; for up's, ``silu(gate)``.
    """
    value, slope = with_slope(jax.nn.silu, gate)
    return up.astype(jnp.float32) * slope, value


def with_slope(
    function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """An elementwise function's value and derivative, in float32."""
    x = x.astype(jnp.float32)
    return jax.jvp(function, (x,), (jnp.ones_like(x),))


def times_packed(dy: jax.Array, packed: Packed, bits: int) -> jax.Array:
    """The product with what was saved, in float32, rounded once."""
    factor = packing.dequantize(packed, dy.shape[-1], bits)
    return _round(dy.astype(jnp.float32) * factor, dy.dtype)


def _round(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds float32, also where a compiler would leave out a cast and its reverse.

    To bfloat16 only, which has float32's exponents: to float16's, XLA's operation
    would make zeros of its subnormal numbers.
    """
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def _quantize(
    ops: ModuleType,
    y: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None,
) -> Operand:
    if criterion is not None:
        quantized = ops.quantize_fallback(
            y,
            theta,
            seeds,
            block=block,
            criterion=criterion,
            colwise=colwise,
            global_offset=global_offset,
        )
        return Operand(*quantized)
    main, by_columns = ops.quantize(
        y,
        seeds,
        block=block,
        rowwise="nearest",
        colwise=colwise,
        global_offset=global_offset,
    )
    return Operand(main, None, jnp.zeros((len(y), 0, 0), jnp.float32), by_columns)
