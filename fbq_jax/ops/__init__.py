"""The library's ops.

Each op takes the operands and options of its definition in ``fbq_jax.kernels``, plus
the argument ``implementation`` of ``dispatch.choose``.  XLA can partition an op over a
mesh, and ``vmap`` can map it; it has no derivative.
"""

from fbq_jax.ops.fused import rms_norm_quantize as rms_norm_quantize
from fbq_jax.ops.fused import (
    rms_norm_quantize_row_blocks as rms_norm_quantize_row_blocks,
)
from fbq_jax.ops.fused import silu_gate_grad_quantize as silu_gate_grad_quantize
from fbq_jax.ops.fused import (
    silu_gate_grad_quantize_row_blocks as silu_gate_grad_quantize_row_blocks,
)
from fbq_jax.ops.fused import silu_gate_quantize as silu_gate_quantize
from fbq_jax.ops.fused import (
    silu_gate_quantize_row_blocks as silu_gate_quantize_row_blocks,
)
from fbq_jax.ops.grouped import ragged_contraction as ragged_contraction
from fbq_jax.ops.grouped import ragged_matmul as ragged_matmul
from fbq_jax.ops.grouped import ragged_quantize as ragged_quantize
from fbq_jax.ops.grouped import ragged_quantize_fallback as ragged_quantize_fallback
from fbq_jax.ops.products import matmul as matmul
from fbq_jax.ops.products import quantize_matmul as quantize_matmul
from fbq_jax.ops.quantization import quantize as quantize
from fbq_jax.ops.quantization import quantize_fallback as quantize_fallback
from fbq_jax.ops.quantization import quantize_row_blocks as quantize_row_blocks
from fbq_jax.ops.quantization import quantize_vectors as quantize_vectors
from fbq_jax.ops.threshold import move_threshold as move_threshold
