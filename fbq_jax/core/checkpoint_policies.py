"""A checkpoint policy for quantized layers under ``nn.remat`` or ``jax.checkpoint``."""

import jax

from fbq_jax.core.matmul_vjp import LHS_NAME, RHS_NAME
from fbq_jax.core.nonlinear import SAVED_NAME

#: Saves the codes and scales that the backward pass reads, the INT8 ones of the GEMMs
#: and those of ``fbq_jax.nonlinear``, and recomputes the rest.  JAX's own policies for
#: dots see none in the quantized ops, and would have the backward pass quantize and
#: multiply once more.
save_codes = jax.checkpoint_policies.save_only_these_names(
    LHS_NAME, RHS_NAME, SAVED_NAME
)
