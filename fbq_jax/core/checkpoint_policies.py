"""A checkpoint policy for quantized layers under ``nn.remat`` or ``jax.checkpoint``."""

import jax

from fbq_jax.core.gemms import LHS_NAME, RHS_NAME, SEED_NAME
from fbq_jax.core.nonlinear import SAVED_NAME

#: Saves the INT8 codes and scales that the backward pass of the GEMMs reads, the seeds
#: of its noise, and the packed codes of ``fbq_jax.nonlinear``; recomputes everything
#: else.  JAX's own policies for dots do not recognize the quantized ops: the backward
#: pass would quantize and multiply again.
save_codes = jax.checkpoint_policies.save_only_these_names(
    LHS_NAME, RHS_NAME, SEED_NAME, SAVED_NAME
)
