"""The public names of ``fbq_jax.contrib.maxtext``."""

from fbq_jax.contrib.maxtext import quantize as quantize
from fbq_jax.contrib.maxtext import quantize_models as quantize_models
