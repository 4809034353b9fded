"""The GEMM of operands with one scale a row: XLA's own INT8 product.

With no scale inside K there is nothing to promote, and XLA's product of two operands
that are contiguous along K is as fast as the tensor cores allow.  They are
contiguous because a kernel has stored them so.  Of codes that XLA computes itself it
may change the layout instead of transposing them, and multiply those by a kernel of its
own that is several times slower.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.reference import MAX_INT32_K, Quantized


def matmul(
    lhs: Quantized,
    residual: None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """``reference.matmul`` with ``blocks = (1, K, 1)`` and no residual."""
    assert residual is None
    assert block_shape == (1, lhs.codes.shape[2], 1)
    product = jnp.float32(0.0)
    for start in range(0, lhs.codes.shape[2], MAX_INT32_K):
        product += _product(
            lhs.codes[:, :, start : start + MAX_INT32_K],
            rhs.codes[:, :, start : start + MAX_INT32_K],
        ).astype(jnp.float32)
    return (product * (lhs.scales * rhs.scales.mT)).astype(dtype)


def _product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Codes ``[B, M, K]`` times ``[B, N, K]``: int32 ``[B, M, N]``.

    Kept apart from what is done with it: XLA's own kernels take no scales, and one that
    it writes to take them may be five times slower (jax 0.11.2 on an H200).
    """
    if len(lhs) == 1:  # as matrices: the fastest kernels have no batch
        product = lax.dot_general(
            lhs[0],
            rhs[0],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.int32,
        )[None]
    else:
        product = lax.dot_general(
            lhs, rhs, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32
        )
    return lax.optimization_barrier(product)
