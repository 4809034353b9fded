"""Non-linear layers that compute in float and save INT10 for the backward pass.

The forward pass is that of Flax and ``jax.nn``.  What it leaves for the backward pass
is held in ``bits`` bits (arXiv 2503.08040 takes 10), rounded to nearest, in groups of
128 channels with a float32 scale each: 1.28 bytes a value instead of bfloat16's 2.

Saved is what the backward pass multiplies by, not the layer's input:

=========== ================================== =========================================
rms_norm,   normalized = (x - mean) * rstd     dx = rstd * (g - mean(g) - normalized *
layer_norm                                     mean(g * normalized)), g = dy * scale
gelu        slope = gelu'(x)                   dx = dy * slope
silu_gate   silu(gate), up * silu'(gate)       dup, dgate = dy * each
=========== ================================== =========================================

(without means in ``rms_norm``).  An error of half a code stays one, whereas that of a
code of x would pass through the derivative: where a group has an outlier, codes of x
leave little of the slopes of its other values.  The norms' ``rstd``, one value a row,
is saved as it is.

A NaN or an Inf in the input makes the gradients that depend on its group NaN, in the
norms those of its row.  There are no second derivatives (they raise).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax.core.dimension_numbers import DTYPES
from fbq_jax.kernels import fused_reference, packing

# checkpoint_name of what the forward pass saves for the backward pass.
SAVED_NAME = "fbq_nonlinear"

BITS = range(4, 13)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    bits: int = 10,
) -> jax.Array:
    """Root mean square normalization (arXiv 1910.07467) over the last axis.

    Args:
      x: bfloat16, float16 or float32 ``[..., C]``.
      scale: float ``[C]``, multiplied in, or None.
      epsilon: added to the mean square.
      bits: of each value saved for the backward pass, 4 to 12.

    Returns:
      An array of x's shape and dtype, computed in float32.

    Raises:
      TypeError: x is of another dtype.
      ValueError: a shape does not fit, or there are no such codes.

    >>> rms_norm(jnp.array([1.0, 7.0]), jnp.array([1.0, 2.0])).round(1)
    Array([0.2, 2.8], dtype=float32)
    """
    return _norm(NormSpec(False, epsilon, bits), x, scale, None)


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    bits: int = 10,
) -> jax.Array:
    """Layer normalization (arXiv 1607.06450) over the last axis.

    Args:
      x: bfloat16, float16 or float32 ``[..., C]``.
      scale: float ``[C]``, multiplied in, or None.
      bias: float ``[C]``, added, or None.
      epsilon: added to the variance.
      bits: of each value saved for the backward pass, 4 to 12.

    Returns:
      An array of x's shape and dtype, computed in float32.

    Raises:
      TypeError: x is of another dtype.
      ValueError: a shape does not fit, or there are no such codes.

    >>> layer_norm(jnp.array([1.0, 2.0, 3.0])).round(3)
    Array([-1.225,  0.   ,  1.225], dtype=float32)
    """
    return _norm(NormSpec(True, epsilon, bits), x, scale, bias)


def gelu(x: jax.Array, approximate: bool = True, *, bits: int = 10) -> jax.Array:
    """``jax.nn.gelu(x, approximate)``.

    Args:
      x: bfloat16, float16 or float32 ``[..., C]``.
      approximate: tanh's approximation or, if False, the error function.
      bits: of each value saved for the backward pass, 4 to 12.

    Raises:
      TypeError: x is of another dtype.
      ValueError: x has no axis, or there are no such codes.
    """
    _check(bits, x=x)
    return _gelu(approximate, bits, x)


def silu_gate(gate: jax.Array, up: jax.Array, *, bits: int = 10) -> jax.Array:
    """``jax.nn.silu(gate) * up``, the gate of SwiGLU (arXiv 2002.05202).

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: of gate's shape and dtype.
      bits: of each value saved for the backward pass, 4 to 12.

    Raises:
      TypeError: an operand is of another dtype.
      ValueError: the operands differ in shape or dtype or have no axis, or there are
        no such codes.
    """
    _check(bits, gate=gate, up=up)
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"gate and up have one shape and dtype; got {gate.dtype} {gate.shape} and "
            f"{up.dtype} {up.shape}"
        )
    return _silu_gate(bits, gate, up)


def _check(bits: int, **operands: jax.Array) -> None:
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits takes an integer from 4 to 12; got {bits!r}")
    for name, x in operands.items():
        if x.dtype not in DTYPES:
            accepted = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
            raise TypeError(f"{name} is {x.dtype}; what is saved takes {accepted}")
        if not x.ndim:
            raise ValueError(f"{name} has no axis to form groups along")


class NormSpec(NamedTuple):
    """What is static: whether the mean is subtracted, epsilon, bits."""

    centered: bool
    epsilon: float
    bits: int


def _norm(
    spec: NormSpec, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    _check(spec.bits, x=x)
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has one value a channel, {x.shape[-1:]}; got {parameter.shape}"
            )

    def as_row(parameter: jax.Array) -> jax.Array:
        return jnp.expand_dims(parameter.astype(jnp.float32), range(x.ndim - 1))

    # The casts' own derivatives give each gradient the dtype of its operand.
    row = None if scale is None else as_row(scale)
    y = _scaled_norm(spec, x.astype(jnp.float32), row)
    if bias is not None:
        y += as_row(bias)
    return y.astype(x.dtype)


class SavedNorm(NamedTuple):
    """What a norm saves; ``rstd`` is ``1 / sqrt(variance + epsilon)`` of each row."""

    normalized: packing.Packed
    rstd: jax.Array
    scale: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_norm(spec: NormSpec, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return _scaled_norm_fwd(spec, x, scale)[0]


def _scaled_norm_fwd(
    spec: NormSpec, x: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, SavedNorm]:
    # In Flax's order of operations, for its results.
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    if spec.centered:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.maximum(variance - mean * mean, 0.0)
        x -= mean
    rstd = fused_reference.find_rstd(variance, spec.epsilon)
    y = fused_reference.apply_norm(x, rstd, scale)
    normalized = _save(x * rstd, spec.bits)
    return y, SavedNorm(normalized, checkpoint_name(rstd, SAVED_NAME), scale)


def norm_bwd(
    spec: NormSpec, saved: SavedNorm, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of x and of the scale (as a row), float32, from dy in float32."""
    normalized = packing.dequantize(saved.normalized, dy.shape[-1], spec.bits)
    grad, dscale = dy, None
    if saved.scale is not None:
        grad = dy * saved.scale
        dscale = jnp.sum(dy * normalized, axis=tuple(range(dy.ndim - 1)), keepdims=True)
    dx = grad - normalized * jnp.mean(grad * normalized, axis=-1, keepdims=True)
    if spec.centered:
        dx -= jnp.mean(grad, axis=-1, keepdims=True)
    return saved.rstd * dx, dscale


_scaled_norm.defvjp(_scaled_norm_fwd, norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gelu(approximate: bool, bits: int, x: jax.Array) -> jax.Array:
    del bits
    return jax.nn.gelu(x, approximate)


def _gelu_fwd(
    approximate: bool, bits: int, x: jax.Array
) -> tuple[jax.Array, packing.Packed]:
    _, slope = fused_reference.with_slope(lambda x: jax.nn.gelu(x, approximate), x)
    return jax.nn.gelu(x, approximate), _save(slope, bits)


def _gelu_bwd(
    approximate: bool, bits: int, slope: packing.Packed, dy: jax.Array
) -> tuple[jax.Array]:
    del approximate
    return (fused_reference.times_packed(dy, slope, bits),)


_gelu.defvjp(_gelu_fwd, _gelu_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _silu_gate(bits: int, gate: jax.Array, up: jax.Array) -> jax.Array:
    del bits
    return jax.nn.silu(gate) * up


def _silu_gate_fwd(
    bits: int, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, tuple[packing.Packed, ...]]:
    saved = tuple(
        _save(factor, bits) for factor in fused_reference.silu_factors(gate, up)
    )
    return jax.nn.silu(gate) * up, saved


def _silu_gate_bwd(
    bits: int, saved: tuple[packing.Packed, ...], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    by_gate, by_up = (
        fused_reference.times_packed(dy, factor, bits) for factor in saved
    )
    return by_gate, by_up


_silu_gate.defvjp(_silu_gate_fwd, _silu_gate_bwd)


def _save(x: jax.Array, bits: int) -> packing.Packed:
    return checkpoint_name(_quantize(x, bits), SAVED_NAME)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
def _quantize(x: jax.Array, bits: int) -> packing.Packed:
    """Without a derivative: rounding's own is 0, which would pass for an answer."""
    return packing.quantize(x, bits)


@_quantize.defjvp
def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("a layer that saves codes has no second derivative")
