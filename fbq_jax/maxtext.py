"""The public names of ``fbq_jax.integrations.maxtext``."""

from fbq_jax.integrations.maxtext import quantize as quantize
from fbq_jax.integrations.maxtext import quantize_models as quantize_models
