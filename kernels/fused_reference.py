"""The definitions of the fused quantization ops: a layer and the quantization after it.

Quantization is the only reader of the output of a norm or a gate in front of a linear
layer, and of the gradient of a gate.  Each op here is such a layer fused with the
quantization of its output.  It returns codes, scales and the arrays that the layer
saves for its backward pass, but not the output itself.

An op is defined as the layer followed by the quantization of ``reference``: blocks with
fallback, or, in the ops whose names end in ``row_blocks``, one scale per row or per
column of a block.  A backend that cannot fuse both passes its own quantization module
as ``ops``.  Layers compute in float32 and round their output once, to the dtype of the
input, before it is quantized.  Operands are stacks of matrices ``[B, R, C]``, as in
``reference``.

The ops of a gate with scales per block also take the tiles of a mixture's experts
(``fbq_jax.kernels.grouped_reference``): ``row_counts`` has the number of rows of each
matrix, and the rest count as zeros, whatever they hold.  A matrix without rows has
scales, sums and a metric of 0; its codes and its packed arrays have no meaning.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import packing, reference
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import (
    FallbackOptions,
    FallbackQuantized,
    Layouts,
    QuantizeOptions,
    RowBlockOptions,
)
from fbq_jax.kernels.rounding import Seeds


class NormQuantized(NamedTuple):
    """The quantized output of a norm, and the arrays that its backward pass reads.

    Attributes:
      operand: the quantized output ``[B, R, C]``; with scales per row of a block, its
        layouts.
      normalized: ``x * rstd`` ``[B, R, C]``, packed.
      rstd: the reciprocal root mean square of each row, float32 ``[B, R, 1]``.
    """

    operand: FallbackQuantized | Layouts
    normalized: Packed
    rstd: jax.Array


class GateQuantized(NamedTuple):
    """The quantized output of a gate and the factors of its gradients.

    Attributes:
      operand: the quantized output ``[B, R, F]``; with scales per row of a block, its
        layouts.
      gate_factor: ``up * silu'(gate)`` ``[B, R, F]``, packed.
      up_factor: ``silu(gate)`` ``[B, R, F]``, packed.
    """

    operand: FallbackQuantized | Layouts
    gate_factor: Packed
    up_factor: Packed


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    *,
    epsilon: float,
    bits: int,
    ops: ModuleType = reference,
    **options: Unpack[FallbackOptions],
) -> NormQuantized:
    """Quantizes the RMS norm ``x / sqrt(mean(x**2) + epsilon) * norm_scale`` of rows.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      norm_scale: float32 ``[B, C]``.
      theta: float32 ``[B]``, the thresholds of fallback; unused without a criterion.
      seeds: the seeds, of B matrices, of stochastic colwise rounding.
      epsilon: a constant added to the mean square.
      bits: the bits of each code of ``normalized``, 4 to 12.
      ops: the module whose quantization ops are used.
      **options: options of ``reference.quantize_fallback``.
    """
    y, normalized, rstd = _rms_norm(x, norm_scale, epsilon, bits)
    return NormQuantized(
        ops.quantize_fallback(y, theta, seeds, **options), normalized, rstd
    )


def rms_norm_quantize_row_blocks(
    x: jax.Array,
    norm_scale: jax.Array,
    seeds: Seeds,
    *,
    epsilon: float,
    bits: int,
    ops: ModuleType = reference,
    **options: Unpack[RowBlockOptions],
) -> NormQuantized:
    """``rms_norm_quantize`` with one scale per row or per column of a block.

    Args:
      x: as in ``rms_norm_quantize``.
      norm_scale: as in ``rms_norm_quantize``.
      seeds: the seeds, of B matrices, of stochastic rounding.
      epsilon: as in ``rms_norm_quantize``.
      bits: as in ``rms_norm_quantize``.
      ops: the module whose quantization ops are used.
      **options: options of ``reference.quantize_row_blocks``.
    """
    y, normalized, rstd = _rms_norm(x, norm_scale, epsilon, bits)
    return NormQuantized(ops.quantize_row_blocks(y, seeds, **options), normalized, rstd)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    bits: int,
    interleaved: bool = True,
    ops: ModuleType = reference,
    **options: Unpack[FallbackOptions],
) -> GateQuantized:
    """Quantizes ``silu(gate) * up``.

    Args:
      gate_up: bfloat16, float16 or float32 ``[B, R, 2 F]``, as ``join_gate_up``
        returns it.
      theta: float32 ``[B]``, the thresholds of fallback; unused without a criterion.
      seeds: the seeds, of B matrices, of stochastic colwise rounding.
      row_counts: int32 ``[B]``, the number of rows of each matrix; None for R.
      bits: the bits of each code of the factors, 4 to 12.
      interleaved: as in ``join_gate_up``.
      ops: the module whose quantization ops are used.
      **options: options of ``reference.quantize_fallback`` for ``[B, R, F]``.
    """
    gate_up = _without_missing_rows(gate_up, row_counts)
    y, *factors = _silu_gate(gate_up, bits, interleaved=interleaved)
    return GateQuantized(ops.quantize_fallback(y, theta, seeds, **options), *factors)


def silu_gate_quantize_row_blocks(
    gate_up: jax.Array,
    seeds: Seeds,
    *,
    bits: int,
    ops: ModuleType = reference,
    **options: Unpack[RowBlockOptions],
) -> GateQuantized:
    """``silu_gate_quantize`` with one scale per row or per column of a block.

    Args:
      gate_up: as in ``silu_gate_quantize``, interleaved.
      seeds: the seeds, of B matrices, of stochastic rounding.
      bits: as in ``silu_gate_quantize``.
      ops: the module whose quantization ops are used.
      **options: options of ``reference.quantize_row_blocks`` for ``[B, R, F]``.
    """
    y, *factors = _silu_gate(gate_up, bits)
    return GateQuantized(ops.quantize_row_blocks(y, seeds, **options), *factors)


def silu_gate_grad_quantize(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    bits: int,
    interleaved: bool = True,
    ops: ModuleType = reference,
    **options: Unpack[QuantizeOptions],
) -> Layouts:
    """Quantizes the gradient of ``gate_up``: dy times each factor, joined.

    Args:
      dy: bfloat16, float16 or float32 ``[B, R, F]``.
      gate_factor: the packed factor of the gate's gradient, from
        ``silu_gate_quantize``.
      up_factor: the packed factor of up's gradient, from ``silu_gate_quantize``.
      seeds: the seeds, of B matrices, of stochastic rounding.
      row_counts: int32 ``[B]``, the number of rows of each matrix; None for R.
      bits: the bits of each code of the factors.
      interleaved: as in ``join_gate_up``.
      ops: the module whose quantization ops are used.
      **options: options of ``reference.quantize`` for the gradient ``[B, R, 2 F]``.
    """
    grad = _silu_gate_grad(dy, gate_factor, up_factor, bits, interleaved=interleaved)
    # The factors of a matrix without rows have no meaning either.
    grad = _without_missing_rows(grad, row_counts)
    quantized: Layouts = ops.quantize(grad, seeds, **options)
    return quantized


def silu_gate_grad_quantize_row_blocks(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    seeds: Seeds,
    *,
    bits: int,
    ops: ModuleType = reference,
    **options: Unpack[RowBlockOptions],
) -> Layouts:
    """``silu_gate_grad_quantize`` with one scale per row of a block in rowwise codes.

    Args:
      dy: as in ``silu_gate_grad_quantize``.
      gate_factor: as in ``silu_gate_grad_quantize``.
      up_factor: as in ``silu_gate_grad_quantize``.
      seeds: the seeds, of B matrices, of stochastic rounding.
      bits: the bits of each code of the factors.
      ops: the module whose quantization ops are used.
      **options: options of ``reference.quantize_row_blocks`` for the gradient
        ``[B, R, 2 F]``, interleaved.
    """
    grad = _silu_gate_grad(dy, gate_factor, up_factor, bits)
    quantized: Layouts = ops.quantize_row_blocks(grad, seeds, **options)
    return quantized


def _rms_norm(
    x: jax.Array, norm_scale: jax.Array, epsilon: float, bits: int
) -> tuple[jax.Array, Packed, jax.Array]:
    """The norm in the dtype of x, packed ``x * rstd``, and ``rstd``."""
    wide, rstd = x.astype(jnp.float32), mean_square_rstd(x, epsilon)
    y = _round(apply_norm(wide, rstd, norm_scale[:, None, :]), x.dtype)
    return y, packing.quantize(wide * rstd, bits), rstd


def _silu_gate(
    gate_up: jax.Array, bits: int, *, interleaved: bool = True
) -> tuple[jax.Array, Packed, Packed]:
    """The gate's output in the dtype of ``gate_up``, and its packed factors."""
    gate, up = split_gate_up(gate_up, interleaved=interleaved)
    slope, value = gate_factors(jax.nn.silu, gate, up)
    y = _round(value * up.astype(jnp.float32), gate_up.dtype)
    return y, packing.quantize(slope, bits), packing.quantize(value, bits)


def _silu_gate_grad(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    bits: int,
    *,
    interleaved: bool = True,
) -> jax.Array:
    """The gradient ``[B, R, 2 F]`` of ``gate_up``, in the dtype of dy."""
    halves = [times_packed(dy, factor, bits) for factor in (gate_factor, up_factor)]
    return join_gate_up(*halves, interleaved=interleaved)


def _without_missing_rows(x: jax.Array, row_counts: jax.Array | None) -> jax.Array:
    """The matrices ``[B, R, C]`` with zeros from row ``row_counts`` on."""
    if row_counts is None:
        return x
    row = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None]
    return jnp.where(row < row_counts[:, None, None], x, jnp.zeros_like(x))


def join_gate_up(
    gate: jax.Array, up: jax.Array, *, interleaved: bool = True
) -> jax.Array:
    """Joins gate and up ``[..., F]`` to one array ``[..., 2 F]``.

    If they are interleaved, they alternate every 128 columns, so that each shard of the
    columns has both.  Otherwise, or if F is not a multiple of 128, all of up follows
    all of gate.
    """
    *lead, size = gate.shape
    shape = (*lead, *_interleaving(size, interleaved))
    pairs = jnp.stack([gate.reshape(shape), up.reshape(shape)], axis=-2)
    return pairs.reshape(*lead, 2 * size)


def split_gate_up(
    gate_up: jax.Array, *, interleaved: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Reverses ``join_gate_up``."""
    *lead, both = gate_up.shape
    groups, width = _interleaving(both // 2, interleaved)
    pairs = gate_up.reshape(*lead, groups, 2, width)
    gate, up = (pairs[..., i, :].reshape(*lead, both // 2) for i in range(2))
    return gate, up


def _interleaving(size: int, interleaved: bool) -> tuple[int, int]:
    """The number of alternating groups of columns, and their width."""
    if not interleaved or size % packing.GROUP:
        return 1, size
    return size // packing.GROUP, packing.GROUP


def mean_square_rstd(x: jax.Array, epsilon: float) -> jax.Array:
    """``1 / sqrt(mean(x**2) + epsilon)`` of each row: float32 ``[B, R, 1]``."""
    wide = x.astype(jnp.float32)
    return find_rstd(jnp.mean(wide * wide, axis=-1, keepdims=True), epsilon)


def find_rstd(variance: jax.Array, epsilon: float) -> jax.Array:
    """``1 / sqrt(variance + epsilon)`` in float32."""
    return lax.rsqrt(variance + epsilon)


def apply_norm(
    x: jax.Array, rstd: jax.Array, norm_scale: jax.Array | None
) -> jax.Array:
    """``x * (rstd * norm_scale)`` in float32.

    The products are in the same order as in Flax, so that results match.
    """
    return x * rstd if norm_scale is None else x * (rstd * norm_scale)


def gate_factors(
    function: Callable[[jax.Array], jax.Array], gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The factors of both gradients of ``function(gate) * up``, in float32.

    Returns:
      ``up * function'(gate)`` for the gate's gradient, ``function(gate)`` for up's.
    """
    value, slope = with_slope(function, gate)
    return up.astype(jnp.float32) * slope, value


def with_slope(
    function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The value and the derivative of an elementwise function, in float32."""
    x = x.astype(jnp.float32)
    return jax.jvp(function, (x,), (jnp.ones_like(x),))


def times_packed(dy: jax.Array, packed: Packed, bits: int) -> jax.Array:
    """``dy`` times a packed array, in float32, rounded once to the dtype of dy."""
    factor = packing.dequantize(packed, dy.shape[-1], bits)
    return _round(dy.astype(jnp.float32) * factor, dy.dtype)


def _round(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds float32 to a dtype, even if the result is cast back to float32.

    A compiler may remove such a pair of casts, but neither ``reduce_precision`` nor a
    rounding to integers.  The former keeps the exponents of float32, which bfloat16 has
    too: with those of float16 it would flush subnormal numbers to zero.
    """
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    elif dtype == jnp.float16:
        limits = jnp.finfo(jnp.float16)
        magnitude = jnp.abs(x)
        subnormal = jnp.round(x * 2.0**24) * 2.0**-24  # in steps of 2**-24
        normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=limits.nmant)
        x = jnp.where(magnitude < float(limits.tiny), subnormal, normal)
        overflow = jnp.abs(normal) > float(limits.max)
        x = jnp.where(overflow, jnp.copysign(jnp.inf, x), x)
    return x.astype(dtype)
