"""The fused quantization ops as Triton kernels: a layer and its quantization at once.

One program computes and quantizes one block.  Registers hold the block of a gate or of
its gradient.  The block of a norm is processed in parts, each of which is computed
twice: first for the saved arrays and for the scales that parts share; then for the
codes, from inputs that a cache now holds.  So is the block of a gate with more than
128x128 values.
"""

from fbq_jax.kernels.triton.fused.forward import (
    rms_norm_quantize,
    rms_norm_quantize_row_blocks,
    silu_gate_quantize,
    silu_gate_quantize_row_blocks,
)
from fbq_jax.kernels.triton.fused.gate_grad import (
    silu_gate_grad_quantize,
    silu_gate_grad_quantize_row_blocks,
)

__all__ = [
    "rms_norm_quantize",
    "rms_norm_quantize_row_blocks",
    "silu_gate_grad_quantize",
    "silu_gate_grad_quantize_row_blocks",
    "silu_gate_quantize",
    "silu_gate_quantize_row_blocks",
]
