"""The GEMM with block scales for a few rows, which reads rhs once.

With few rows, the time is that of reading rhs from memory.  So a program computes all
rows of a narrow range of columns: there are more programs than multiprocessors, and
each one keeps several tiles of rhs on their way.  All rows are in one block of lhs, or
each row has its own scales.  A program multiplies both terms in every step: lists of
the residuals that are used would take longer to make than they save.
"""

from typing import NamedTuple

import jax
import triton
import triton.language as tl
from jax.experimental.pallas import cdiv

from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.triton.gemm import align, compute_capability, row_scales_last
from fbq_jax.kernels.triton.gemm_kernel import (
    add_product,
    clamped_range,
    load,
    outer_product,
    scale_offsets,
    store,
)
from fbq_jax.kernels.triton.launch import launch


class Config(NamedTuple):
    """Tuning options.  They change the speed of the kernel, not its result.

    Attributes:
      BN: columns of a tile.
      num_warps: warps per program.
      num_stages: depth of the pipeline of loads.
    """

    BN: int = 32
    num_warps: int = 4
    num_stages: int = 6


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does, for ``M <= m`` or ``m == 1``.

    Args:
      lhs: codes ``[B, M, K]`` as in ``gemm.matmul``, scales float32
        ``[B, 1, ceil(K/k)]``, or ``[B, M, ceil(K/k)]`` if ``m == 1``.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes ``[B, N, K]``, scales float32 ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``, each 32, 64, 128 or 256; m and n may also be 1.
      dtype: dtype of the output.
      sm: compute capability of the GPU times ten; by default that of the first device
        of this process.
      config: tuning options.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    sm = sm or compute_capability()
    config = config or Config()
    m, k, n = block_shape
    batch, M, K = lhs.codes.shape
    N = rhs.codes.shape[1]
    lhs, rhs = align(lhs), align(rhs)
    second = lhs if residual is None else align(residual)  # not read without one
    lhs, second, rhs = (
        row_scales_last(*pair) for pair in ((lhs, m), (second, m), (rhs, n))
    )
    (out,) = launch(
        few_rows_kernel,
        *lhs[:2],
        *second[:2],
        *rhs[:2],
        cdiv(K, k),
        outputs=[jax.ShapeDtypeStruct((batch, M, N), dtype)],
        grid=(batch * cdiv(N, config.BN),),
        M=M,
        N=N,
        K=lhs.codes.shape[2],
        m=m,
        k=k,
        n=n,
        BM=max(16, triton.next_power_of_2(M)),
        **config._asdict(),
        FALLBACK=residual is not None,
        MAGIC_CONVERSION=sm < 89,
    )
    return out


@triton.jit
def few_rows_kernel(
    lhs,
    lhs_scales,
    residual,
    residual_scales,
    rhs,
    rhs_scales,
    step_count,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    m: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FALLBACK: tl.constexpr,
    MAGIC_CONVERSION: tl.constexpr,
):
    """Computes ``BN`` columns of the output."""
    k_blocks: tl.constexpr = (K + k - 1) // k
    tiles: tl.constexpr = (N + BN - 1) // BN
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BN

    i = clamped_range(0, BM, 0, M, BM)
    j = clamped_range(0, BN, column, N, BN)
    c = tl.arange(0, k)
    lhs_offsets = batch * M * K + i[:, None] * K + c[None, :]
    rhs_offsets = c[:, None] + j[None, :] * K
    rhs += (batch * N + column) * K
    tl.static_assert(m == 1 or m >= M)
    lhs_rows = scale_offsets(batch, 0, i, 1, M, m, min(m, BM), k_blocks)
    lhs_scales += lhs_rows
    residual_scales += lhs_rows
    rhs_scales += scale_offsets(batch, column, j, 0, N, n, BN, k_blocks)
    lhs_stride: tl.constexpr = M if m == 1 else 1  # from a K block to the next one
    rhs_stride: tl.constexpr = N if n == 1 else 1

    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(step_count):
        inside = c < K - step * k
        b = load(rhs + step * k + rhs_offsets, inside[:, None], K % k == 0)
        scale = tl.load(rhs_scales + step * rhs_stride)
        a = load(lhs + step * k + lhs_offsets, inside[None, :], K % k == 0)
        lhs_scale = tl.load(lhs_scales + step * lhs_stride)
        both = outer_product(lhs_scale, scale, m, n)
        acc = add_product(acc, a, b, both, MAGIC_CONVERSION)
        if FALLBACK:
            # Codes of a residual that is not used are arbitrary, and its scale is 0.
            a = load(residual + step * k + lhs_offsets, inside[None, :], K % k == 0)
            lhs_scale = tl.load(residual_scales + step * lhs_stride)
            both = outer_product(lhs_scale, scale, m, n)
            acc = add_product(acc, a, b, both, MAGIC_CONVERSION)
    store(out + batch * M * N + column, acc, 0, column, 0, M, N)
