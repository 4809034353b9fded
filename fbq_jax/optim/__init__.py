"""Optimizers that write the codes of weights, and optimizers with FP8 state."""

from fbq_jax.fp8.optim import Fp8AdamState as Fp8AdamState
from fbq_jax.fp8.optim import MasterWeightsState as MasterWeightsState
from fbq_jax.fp8.optim import fp8_adamw as fp8_adamw
from fbq_jax.fp8.optim import scale_by_fp8_adam as scale_by_fp8_adam
from fbq_jax.fp8.optim import with_master_weights as with_master_weights
from fbq_jax.optim.code_writer import CodeWriter as CodeWriter
from fbq_jax.optim.code_writer import assert_live as assert_live
from fbq_jax.optim.code_writer import with_codes as with_codes
from fbq_jax.optim.code_writer import write_codes as write_codes
