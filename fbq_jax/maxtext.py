"""The public names of ``fbq_jax.integrations.maxtext``, as MaxText imports them."""

from fbq_jax.integrations.maxtext import COLLECTIONS as COLLECTIONS
from fbq_jax.integrations.maxtext import FallbackDotGeneral as FallbackDotGeneral
from fbq_jax.integrations.maxtext import Quantization as Quantization
