"""Norms and gates in front of the quantization kernels.

XLA fuses a norm, a gate or its gradient into one pass, with the packing of what the
backward pass reads.  The kernel that quantizes reads the output, in its own dtype.
"""

from typing import Unpack

import jax

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import FallbackOptions, Layouts, QuantizeOptions
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.kernels.tpu import quantize


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    *,
    epsilon: float,
    bits: int,
    **options: Unpack[FallbackOptions],
) -> NormQuantized:
    """Quantizes as ``fused_reference.rms_norm_quantize`` does, with its arguments."""
    return fused_reference.rms_norm_quantize(
        x,
        norm_scale,
        theta,
        seeds,
        epsilon=epsilon,
        bits=bits,
        ops=quantize,
        **options,
    )


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    bits: int,
    interleaved: bool = True,
    **options: Unpack[FallbackOptions],
) -> GateQuantized:
    """Quantizes as ``fused_reference.silu_gate_quantize`` does, with its arguments."""
    return fused_reference.silu_gate_quantize(
        gate_up,
        theta,
        seeds,
        row_counts,
        bits=bits,
        interleaved=interleaved,
        ops=quantize,
        **options,
    )


def silu_gate_grad_quantize(
    dy: jax.Array,
    gate_factor: Packed,
    up_factor: Packed,
    seeds: Seeds,
    row_counts: jax.Array | None = None,
    *,
    bits: int,
    interleaved: bool = True,
    **options: Unpack[QuantizeOptions],
) -> Layouts:
    """Quantizes as ``fused_reference.silu_gate_grad_quantize``, with its arguments."""
    return fused_reference.silu_gate_grad_quantize(
        dy,
        gate_factor,
        up_factor,
        seeds,
        row_counts,
        bits=bits,
        interleaved=interleaved,
        ops=quantize,
        **options,
    )
