"""Norms and gates in front of the quantization kernels.

XLA fuses a norm, a gate or its gradient into one pass, with the packing of what the
backward pass reads.  The kernel that quantizes reads the output, in its own dtype.
"""

import functools

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.tpu import quantize

rms_norm_quantize = functools.partial(fused_reference.rms_norm_quantize, ops=quantize)
silu_gate_quantize = functools.partial(fused_reference.silu_gate_quantize, ops=quantize)
silu_gate_grad_quantize = functools.partial(
    fused_reference.silu_gate_grad_quantize, ops=quantize
)
