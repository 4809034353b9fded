"""The fused quantization ops as Triton kernels: a layer and its quantization at once.

One program computes and quantizes one block.  The values and the saved arrays of a
block do not fit into registers, so the block is processed in parts.  Each part is
computed twice: first for the saved arrays and for the scales that parts share; then for
the codes, from inputs that a cache now holds.
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
