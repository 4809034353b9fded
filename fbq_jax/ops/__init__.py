"""The library's ops: ``quantize``, ``matmul``, ``contract`` and ``move_threshold``.

Each op takes the operands and options of its definition in ``fbq_jax.kernels``, plus
the argument ``implementation`` of ``dispatch.choose``.  XLA can partition an op over a
mesh, and ``vmap`` can map it; it has no derivative.

The ops know neither their backends, nor what partitions them, nor norms and gates; this
puts them together.
"""

from fbq_jax.ops import backends as backends
from fbq_jax.ops import fused_sources as fused_sources
from fbq_jax.ops.group_products import contract as contract
from fbq_jax.ops.op import Op
from fbq_jax.ops.products import matmul as matmul
from fbq_jax.ops.quantization import quantize as quantize
from fbq_jax.ops.threshold import move_threshold as move_threshold
from fbq_jax.sharding import partitioning

Op.partition = staticmethod(partitioning.call_partitioned)
