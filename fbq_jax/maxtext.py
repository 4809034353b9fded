"""MaxText's ``quant=``, under the name that MaxText imports."""

from fbq_jax.integrations.maxtext import Quantization as Quantization
