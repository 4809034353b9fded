"""The GEMM for a few rows that quantizes them itself.

The values of a few rows stay in the L2 cache.  So each program of ``few_rows_gemm``
quantizes the K blocks that it multiplies, and a layer needs one kernel in place of two.
Only programs of a K block that falls back compute its residual.
"""

import jax
import triton
import triton.language as tl

from fbq_jax.kernels.reference import Criterion, Quantized
from fbq_jax.kernels.triton import few_rows_gemm
from fbq_jax.kernels.triton.block_codes import (
    find_amax,
    multiply,
    nearest,
    residual_of,
    scale_and_inverse,
)
from fbq_jax.kernels.triton.few_rows_gemm import (
    BlockShape,
    Config,
    launch_parts,
    locate_part,
    rows_of_tile,
    stages,
    store_part,
)
from fbq_jax.kernels.triton.gemm import align_rows
from fbq_jax.kernels.triton.gemm_kernel import (
    add_product,
    clamped_range,
    load,
    outer_product,
    scale_offsets,
)
from fbq_jax.kernels.triton.launch import compute_capability


def default_config(shape: tuple[int, ...], k: int, *, itemsize: int, sm: int) -> Config:
    """Chooses the configuration for ``(batch, M, N, K)`` in K blocks of k.

    Tiles and parts of K are those of ``few_rows_gemm``, so that both kernels add in the
    same order.

    Args:
      shape: ``(batch, M, N, K)``.
      k: the length of a K block.
      itemsize: bytes of an element of x.
      sm: compute capability of the GPU times ten.
    """
    config = few_rows_gemm.default_config(shape, k, sm=sm)
    rows = rows_of_tile(shape[1])
    num_warps = 4 if rows * k <= 2**12 else 8  # a thread holds up to 32 values
    size = (config.BN + rows * itemsize) * k
    return config._replace(num_warps=num_warps, num_stages=stages(size, sm))


def quantize_matmul(
    x: jax.Array,
    theta: jax.Array,
    rhs: Quantized,
    *,
    block_shape: BlockShape,
    criterion: Criterion | None,
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """See ``reference.quantize_matmul``; for ``M <= m`` or ``m == 1``.

    Args:
      x: ``[B, M, K]``.
      theta: float32 ``[B]``.
      rhs: codes int8 ``[B, N, K]``, scales float32 ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``, each 32, 64, 128 or 256; m and n may also be 1.
      criterion: ``"absmax"``, or None for no fallback.  With fallback, m is not 1.
      dtype: dtype of the output.
      sm: as in ``few_rows_gemm.matmul``.
      config: tuning options.

    Returns:
      ``[B, M, N]`` in ``dtype``, with the bits of ``few_rows_gemm.matmul`` if that has
      as many splits.
    """
    sm = sm or compute_capability()
    fallback = criterion is not None
    batch, M, K = x.shape
    sizes = batch, M, rhs.codes.shape[1], K
    config = config or default_config(
        sizes, block_shape[1], itemsize=x.dtype.itemsize, sm=sm
    )
    return launch_parts(
        few_rows_quantize_kernel,
        (align_rows(x), theta),
        rhs,
        sizes,
        block_shape=block_shape,
        dtype=dtype,
        fallback=fallback,
        sm=sm,
        config=config,
    )


@triton.jit
def few_rows_quantize_kernel(
    x,
    theta,
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
    SPLITS: tl.constexpr,
    FALLBACK: tl.constexpr,
    MAGIC_CONVERSION: tl.constexpr,
):
    """Computes ``BN`` columns of the output from a part of the K blocks."""
    k_blocks: tl.constexpr = (K + k - 1) // k
    at = locate_part(N, BN, SPLITS)
    split, batch, column = at
    # Rows below the last one repeat it, which changes no maximum.
    i = clamped_range(0, BM, 0, M, BM)
    j = clamped_range(0, BN, column, N, BN)
    c = tl.arange(0, k)
    x_offsets = batch * M * K + i[None, :] * K + c[:, None]
    rhs_offsets = j[:, None] * K + c[None, :]
    rhs += (batch * N + column) * K
    rhs_scales += scale_offsets(batch, column, j, 1, N, n, BN, k_blocks)
    rhs_stride: tl.constexpr = N if n == 1 else 1  # from a K block to the next one
    tl.static_assert(m >= M or (m == 1 and not FALLBACK))
    if FALLBACK:
        limit = tl.load(theta + batch)
        limit = tl.where(limit >= 0.0, limit, 0.0)

    # Beyond the last K block, values and codes are 0.
    ALL: tl.constexpr = k_blocks % SPLITS == 0 and K % k == 0
    first = split * step_count
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, first + step_count):
        inside = c < K - step * k
        block = step if ALL else tl.minimum(step, k_blocks - 1)
        b = load(rhs + step * k + rhs_offsets, inside[None, :], ALL)
        rhs_scale = tl.load(rhs_scales + block * rhs_stride)
        values = (load(x + step * k + x_offsets, inside[:, None], ALL),)
        if m == 1:
            amax = find_amax(values, 0)
            scale, inverse = scale_and_inverse(amax)
            rounded = nearest(multiply(values, inverse[None, :]))
        else:
            amax = find_amax(values)
            scale, inverse = scale_and_inverse(amax)
            rounded = nearest(multiply(values, inverse))
        both = outer_product(rhs_scale, scale, n, m)
        acc = add_product(acc, b, rounded[0].to(tl.int8), both, MAGIC_CONVERSION)
        if FALLBACK:  # noqa: SIM102 (a constant)
            # The second condition is false where scale * 127 overflows.
            if (amax > limit) & (scale * 127.0 < float("inf")):
                rest = residual_of(values, rounded, scale)
                scale, inverse = scale_and_inverse(find_amax(rest))
                codes = nearest(multiply(rest, inverse))[0].to(tl.int8)
                both = outer_product(rhs_scale, scale, n, m)
                acc = add_product(acc, b, codes, both, MAGIC_CONVERSION)

    store_part(out, acc, at, M, N, SPLITS)
