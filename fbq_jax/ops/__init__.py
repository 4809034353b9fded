"""The library's ops: ``quantize``, ``matmul``, ``contract`` and ``move_threshold``.

Each op takes the operands and options of its definition in ``fbq_jax.kernels``, plus
the argument ``implementation`` of ``dispatch.choose``.  XLA can partition an op over a
mesh, and ``vmap`` can map it; it has no derivative.
"""

from fbq_jax.ops.products import contract as contract
from fbq_jax.ops.products import matmul as matmul
from fbq_jax.ops.quantization import quantize as quantize
from fbq_jax.ops.threshold import move_threshold as move_threshold
