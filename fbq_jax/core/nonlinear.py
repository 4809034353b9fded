"""Non-linear layers that compute in float and save INT10 for the backward pass.

The forward pass equals Flax's and ``jax.nn``'s.  The values saved for the backward pass
are rounded to nearest and packed in ``bits`` bits each (10 in arXiv 2503.08040), with
one float32 scale for each group of 128 channels: 1.28 bytes per value, where
bfloat16 takes 2.

The layers save the factors that the backward pass multiplies by, not their input:

=========== ================================== =========================================
rms_norm,   normalized = (x - mean) * rstd     dx = rstd * (g - mean(g) - normalized *
layer_norm                                     mean(g * normalized)), g = dy * scale
gelu        slope = gelu'(x)                   dx = dy * slope
silu_gate   silu(gate), up * silu'(gate)       dup, dgate = dy * each
gelu_gate   gelu(gate), up * gelu'(gate)       dup, dgate = dy * each
=========== ================================== =========================================

(``rms_norm`` has no means.)  A rounding error of half a step in a factor stays half a
step in the gradient.  An error in x would pass through the derivative: if a group
has an outlier, its scale is so large that the other values of x lose most of their
bits, and with them their slopes.
The norms also save ``rstd`` in float32, one value per row.

A NaN or an Inf in the input turns the gradients of its group into NaN; in the norms, it
affects its entire row.  Second derivatives raise ``NotImplementedError``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax.core.arguments import DTYPE_NAMES, DTYPES
from fbq_jax.kernels import layer_sources, packing
from fbq_jax.ops import dispatch
from fbq_jax.sharding.explicit_axes import apply_by_rows, reshard_as
from fbq_jax.sharding.mesh_axes import as_varying

# The checkpoint_name of the values saved for the backward pass.
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

        y = x / sqrt(mean(x^2) + epsilon) * scale

    Args:
      x: bfloat16, float16 or float32 ``[..., C]``.
      scale: float ``[C]``, multiplies the normalized values; None for no scale.
      epsilon: added to the mean square.
      bits: bits per value saved for the backward pass, 4 to 12.

    Returns:
      An array of x's shape and dtype, computed in float32.

    Raises:
      TypeError: x has another dtype.
      ValueError: x has no axis, a parameter is not ``[C]``, or ``bits`` is out of
        range.

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

        y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias

    Args:
      x: bfloat16, float16 or float32 ``[..., C]``.
      scale: float ``[C]``, multiplies the normalized values; None for no scale.
      bias: float ``[C]``, added at the end; None for no bias.
      epsilon: added to the variance.
      bits: bits per value saved for the backward pass, 4 to 12.

    Returns:
      An array of x's shape and dtype, computed in float32.

    Raises:
      TypeError: x has another dtype.
      ValueError: x has no axis, a parameter is not ``[C]``, or ``bits`` is out of
        range.

    >>> layer_norm(jnp.array([1.0, 2.0, 3.0])).round(3)
    Array([-1.225,  0.   ,  1.225], dtype=float32)
    """
    return _norm(NormSpec(True, epsilon, bits), x, scale, bias)


def gelu(x: jax.Array, approximate: bool = True, *, bits: int = 10) -> jax.Array:
    """``jax.nn.gelu(x, approximate)``, the Gaussian error linear unit.

    Args:
      x: bfloat16, float16 or float32 ``[..., C]``.
      approximate: True for the tanh approximation, False for the error function.
      bits: bits per value saved for the backward pass, 4 to 12.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: x has another dtype.
      ValueError: x has no axis, or ``bits`` is out of range.
    """
    check_operands(bits, x=x)
    function = functools.partial(jax.nn.gelu, approximate=approximate)
    return _pointwise(
        function, lambda x: layer_sources.with_slope(function, x)[1:], bits, x
    )


def silu_gate(gate: jax.Array, up: jax.Array, *, bits: int = 10) -> jax.Array:
    """``jax.nn.silu(gate) * up``, the gate of SwiGLU (arXiv 2002.05202).

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: an array of gate's shape and dtype.
      bits: bits per value saved for the backward pass, 4 to 12.

    Returns:
      An array of gate's shape and dtype.

    Raises:
      TypeError: an operand has another dtype.
      ValueError: the operands differ in shape or dtype or have no axis, or ``bits`` is
        out of range.
    """
    return _gate(jax.nn.silu, bits, gate, up)


def gelu_gate(
    gate: jax.Array, up: jax.Array, approximate: bool = True, *, bits: int = 10
) -> jax.Array:
    """``jax.nn.gelu(gate, approximate) * up``, the gate of GEGLU (arXiv 2002.05202).

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: an array of gate's shape and dtype.
      approximate: True for the tanh approximation, False for the error function.
      bits: bits per value saved for the backward pass, 4 to 12.

    Returns:
      An array of gate's shape and dtype.

    Raises:
      TypeError: an operand has another dtype.
      ValueError: the operands differ in shape or dtype or have no axis, or ``bits`` is
        out of range.
    """
    function = functools.partial(jax.nn.gelu, approximate=approximate)
    return _gate(function, bits, gate, up)


def _gate(
    function: Callable[[jax.Array], jax.Array],
    bits: int,
    gate: jax.Array,
    up: jax.Array,
) -> jax.Array:
    """``function(gate) * up``; raises the errors that the gates document."""
    check_operands(bits, gate=gate, up=up)
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            "gate and up must have the same shape and dtype; got "
            f"{gate.dtype} {gate.shape} and {up.dtype} {up.shape}"
        )
    gate, up = as_varying((gate, reshard_as(up, gate)))
    factors = functools.partial(layer_sources.gate_factors, function)
    return _pointwise(lambda gate, up: function(gate) * up, factors, bits, gate, up)


def check_bits(bits: int) -> None:
    """Raises ValueError if ``bits`` is out of range."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits must be an integer from 4 to 12; got {bits!r}")


def check_operands(bits: int, **operands: jax.Array) -> None:
    """Raises the errors that the layers document, of operands by name."""
    check_bits(bits)
    for name, x in operands.items():
        _check_is_array(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; this layer takes {DTYPE_NAMES}")
        if not x.ndim:
            raise ValueError(f"{name} has no axis; this layer takes [..., C]")


def _check_is_array(name: str, x: object) -> None:
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"{name} is a {type(x).__name__}; this layer takes an array of "
            f"{DTYPE_NAMES}"
        )


class NormSpec(NamedTuple):
    """Static arguments: whether to subtract the mean, epsilon and bits."""

    centered: bool
    epsilon: float
    bits: int


def _norm(
    spec: NormSpec, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    check_operands(spec.bits, x=x)
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is None:
            continue
        _check_is_array(name, parameter)
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have one value per channel, {x.shape[-1:]}; got "
                f"{parameter.shape}"
            )

    def as_row(parameter: jax.Array) -> jax.Array:
        wide = reshard_as(parameter, x).astype(jnp.float32)
        return jnp.expand_dims(wide, range(x.ndim - 1))

    # The derivative of each cast gives a gradient the dtype of its operand.
    row = None if scale is None else as_row(scale)
    y = _scaled_norm(spec, *as_varying((x.astype(jnp.float32), row)))
    if bias is not None:
        y += as_row(bias)
    return y.astype(x.dtype)


class SavedNorm(NamedTuple):
    """A norm's residuals; ``rstd`` is ``1 / sqrt(variance + epsilon)`` of each row."""

    normalized: packing.Packed
    rstd: jax.Array
    scale: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_norm(spec: NormSpec, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return _scaled_norm_fwd(spec, x, scale)[0]


def _scaled_norm_fwd(
    spec: NormSpec, x: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, SavedNorm]:
    # The order of operations is Flax's, for equal results.
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    if spec.centered:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.maximum(variance - mean * mean, 0.0)
        x -= mean
    rstd = layer_sources.find_rstd(variance, spec.epsilon)
    y = layer_sources.apply_norm(x, rstd, scale)
    normalized = _save(x * rstd, spec.bits)
    return y, SavedNorm(normalized, checkpoint_name(rstd, SAVED_NAME), scale)


def norm_bwd(
    spec: NormSpec, saved: SavedNorm, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The float32 gradients of x and of the scale (as a row), from float32 dy."""
    normalized = apply_by_rows(
        lambda dy, packed: packing.dequantize(packed, dy.shape[-1], spec.bits),
        dy,
        saved.normalized,
    )
    grad, dscale = dy, None
    if saved.scale is not None:
        grad = dy * saved.scale
        dscale = jnp.sum(dy * normalized, axis=tuple(range(dy.ndim - 1)), keepdims=True)
    dx = grad - normalized * jnp.mean(grad * normalized, axis=-1, keepdims=True)
    if spec.centered:
        dx -= jnp.mean(grad, axis=-1, keepdims=True)
    return saved.rstd * dx, dscale


_scaled_norm.defvjp(_scaled_norm_fwd, norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _pointwise(
    function: Callable[..., jax.Array],
    factors: Callable[..., Sequence[jax.Array]],
    bits: int,
    *operands: jax.Array,
) -> jax.Array:
    """Applies a function whose gradients are ``dy`` times the saved factors.

    Args:
      function: maps the operands to y, elementwise.
      factors: maps the operands to the derivative with respect to each.
      bits: bits per saved value.
      *operands: arrays of one shape and dtype.
    """
    del factors, bits
    return function(*operands)


def _pointwise_fwd(
    function: Callable[..., jax.Array],
    factors: Callable[..., Sequence[jax.Array]],
    bits: int,
    *operands: jax.Array,
) -> tuple[jax.Array, list[packing.Packed]]:
    saved = [_save(factor, bits) for factor in factors(*operands)]
    return function(*operands), saved


def _pointwise_bwd(
    _function: Any, _factors: Any, bits: int, saved: list[packing.Packed], dy: jax.Array
) -> tuple[jax.Array, ...]:
    times_packed = functools.partial(layer_sources.times_packed, bits=bits)
    return tuple(apply_by_rows(times_packed, dy, factor) for factor in saved)


_pointwise.defvjp(_pointwise_fwd, _pointwise_bwd)


def _save(x: jax.Array, bits: int) -> packing.Packed:
    dispatch.warn_of_packing()
    # Otherwise, XLA may keep what is packed, floats or words of 16 bits, until the
    # backward pass.
    packed = jax.lax.optimization_barrier(_quantize(x, bits))
    return checkpoint_name(packed, SAVED_NAME)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
def _quantize(x: jax.Array, bits: int) -> packing.Packed:
    """Packs x.  Derivatives raise: rounding's, which is 0, would be silently wrong."""
    return apply_by_rows(functools.partial(packing.quantize, bits=bits), x)


@_quantize.defjvp
def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "a layer that saves quantized values has no second derivative"
    )
