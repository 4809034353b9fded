"""MaxText's ``quant=`` under the name that is imported there."""

from fbq_jax.integrations.maxtext import Quantization as Quantization
