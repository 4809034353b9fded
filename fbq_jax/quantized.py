"""``Quantized``, the operand of the GEMMs, as Flax and ``jax.export`` store it."""

from fbq_jax.core.serialization import register_export, serializable_namedtuple
from fbq_jax.kernels.quantized import Quantized as Quantized
from fbq_jax.kernels.quantized import Term as Term

# The names that exported functions of 0.1.0 have for them.
serializable_namedtuple(Term, "Quantized")
register_export(Quantized, ("main", "residual"), "QTensor")
