"""The sources of ``quantize`` that are outputs of layers in front of a GEMM.

Quantization is the only reader of the output of a norm or a gate in front of a linear
layer, and of the gradient of a gate.  A kernel computes such a source and quantizes it
at once, so its output is never stored.  The layer computes in float32 and rounds its
output once, to the dtype of the input, before it is quantized.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import packing
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.sources import Shape


class SavedNorm(NamedTuple):
    """What a norm saves for its backward pass.

    Attributes:
      normalized: ``x * rstd`` ``[B, R, C]``, packed.
      rstd: the reciprocal root mean square of each row, float32 ``[B, R, 1]``.
    """

    normalized: Packed
    rstd: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale"],
    meta_fields=["epsilon", "bits"],
)
@dataclasses.dataclass(frozen=True)
class Norm:
    """The RMS norm ``x / sqrt(mean(x**2) + epsilon) * scale`` of rows.

    It saves ``SavedNorm``.

    Attributes:
      values: x, bfloat16, float16 or float32 ``[B, R, C]``.
      scale: float32 ``[B, C]``.
      epsilon: a constant added to the mean square.
      bits: the bits of each code of ``SavedNorm.normalized``, 4 to 12.
    """

    values: jax.Array
    scale: jax.Array
    epsilon: float
    bits: int

    @property
    def row_counts(self) -> None:
        """None: all rows count."""
        return None

    @property
    def shape(self) -> Shape:
        """The shape ``(B, R, C)`` of the output."""
        batch, rows, columns = self.values.shape
        return batch, rows, columns

    def compute(self) -> tuple[jax.Array, SavedNorm]:
        """The norm in the dtype of x, and what it saves."""
        x = self.values
        wide, rstd = x.astype(jnp.float32), mean_square_rstd(x, self.epsilon)
        y = round_to(apply_norm(wide, rstd, self.scale[:, None, :]), x.dtype)
        packed = packing.as_words(packing.quantize(wide * rstd, self.bits))
        return y, SavedNorm(packed, rstd)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "row_counts"],
    meta_fields=["bits", "interleaved"],
)
@dataclasses.dataclass(frozen=True)
class Gate:
    """``silu(gate) * up``.

    It saves the factors of the gradients of gate, ``up * silu'(gate)``, and of up,
    ``silu(gate)``, packed: ``[B, 2, R, F]``.

    Attributes:
      values: gate and up, bfloat16, float16 or float32 ``[B, R, 2 F]``, as
        ``join_gate_up`` returns them.
      row_counts: int32 ``[B]``, the number of rows of each matrix; None for R.
      bits: the bits of each code of the factors, 4 to 12.
      interleaved: as in ``join_gate_up``.
    """

    values: jax.Array
    row_counts: jax.Array | None
    bits: int
    interleaved: bool = True

    @property
    def shape(self) -> Shape:
        """The shape ``(B, R, F)`` of the output."""
        batch, rows, columns = self.values.shape
        return batch, rows, columns // 2

    def compute(self) -> tuple[jax.Array, Packed]:
        """The gate's output in the dtype of its input, and what it saves."""
        values = _without_missing_rows(self.values, self.row_counts)
        gate, up = split_gate_up(values, interleaved=self.interleaved)
        slope, value = gate_factors(jax.nn.silu, gate, up)
        y = round_to(value * up.astype(jnp.float32), values.dtype)
        factors = packing.quantize(jnp.stack((slope, value), 1), self.bits)
        return y, packing.as_words(factors)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "factors", "row_counts"],
    meta_fields=["bits", "interleaved"],
)
@dataclasses.dataclass(frozen=True)
class GateGrad:
    """The gradient ``[B, R, 2 F]`` of gate and up: dy times each factor, joined.

    Attributes:
      values: dy, bfloat16, float16 or float32 ``[B, R, F]``.
      factors: what ``Gate`` saves.
      row_counts: int32 ``[B]``, the number of rows of each matrix; None for R.
      bits: the bits of each code of the factors.
      interleaved: as in ``join_gate_up``.
    """

    values: jax.Array
    factors: Packed
    row_counts: jax.Array | None
    bits: int
    interleaved: bool = True

    @property
    def shape(self) -> Shape:
        """The shape ``(B, R, 2 F)`` of the gradient."""
        batch, rows, columns = self.values.shape
        return batch, rows, 2 * columns

    def compute(self) -> tuple[jax.Array, tuple[()]]:
        """The gradient in the dtype of dy."""
        both = times_packed(self.values[:, None], self.factors, self.bits)
        grad = join_gate_up(both[:, 0], both[:, 1], interleaved=self.interleaved)
        # The factors of a matrix without rows have no meaning either.
        return _without_missing_rows(grad, self.row_counts), ()


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
    return round_to(dy.astype(jnp.float32) * factor, dy.dtype)


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds float32 to a dtype, even if the result is cast back to float32.

    A compiler may remove such a pair of casts, but neither ``reduce_precision`` nor a
    rounding to integers.  The former keeps the exponents of float32, which bfloat16 has
    too: with exponents of float16 it would flush subnormal numbers to zero.
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
