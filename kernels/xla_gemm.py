"""The GEMM of operands with one scale per row: XLA's own INT8 product.

There is no scale inside K, so no product needs promotion, and XLA's product of two
operands that are contiguous along K is as fast as the tensor cores allow.

This holds for operands that a kernel has stored.  If XLA computes the codes itself, it
may change their layout instead of transposing them, and then multiplies with a kernel
that is several times slower.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.quantized import Quantized
from fbq_jax.kernels.reference import MAX_INT32_K, round_to, scale_product


def matmul(lhs: Quantized, rhs: Quantized, *, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Multiplies as ``reference.matmul`` does, for INT8 codes with one scale per row.

    Args:
      lhs: the left operand ``[B, M, K]``, of one term with block ``(1, None)``.
      rhs: the right operand ``[B, N, K]``, of one term with block ``(1, None)``.
      dtype: the dtype of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    assert lhs.residual is None
    assert lhs.block == rhs.block == (1, None)
    product = jnp.float32(0.0)
    for start in range(0, lhs.shape[2], MAX_INT32_K):
        piece = slice(start, start + MAX_INT32_K)
        part = product_of_codes(lhs.codes[:, :, piece], rhs.codes[:, :, piece])
        product += part.astype(jnp.float32)
    return scaled(product, lhs.scales * rhs.scales.mT, dtype)


def scaled(
    product: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """A float32 product of codes times its scales, rounded whatever reads it."""
    return round_to(scale_product(product, scales), dtype)


def product_of_codes(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Multiplies codes ``[B, M, K]`` and ``[B, N, K]``: int32 ``[B, M, N]``.

    It is exact for K up to ``MAX_INT32_K``.

    On a TPU, XLA fuses the scaling into the product.  On a GPU, a barrier keeps it from
    that: library kernels take no scales, and the kernel that XLA generates instead may
    be five times slower (jax 0.11.2 on an H200).
    """
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.int32)
    if len(lhs) == 1:  # The fastest library kernels have no batch dimension.
        product = dot(lhs[0], rhs[0], (((1,), (1,)), ((), ())))[None]
    else:
        product = dot(lhs, rhs, (((2,), (2,)), ((0,), (0,))))
    return lax.platform_dependent(
        product, tpu=lambda product: product, default=lax.optimization_barrier
    )
