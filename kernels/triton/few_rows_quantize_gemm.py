"""The GEMM for a few rows that quantizes them itself.

The values of a few rows stay in the L2 cache.  So each program of ``few_rows_gemm``
quantizes the K blocks that it multiplies, and a layer needs one kernel in place of two.
Only programs of a K block that falls back compute its residual.
"""

import jax
import triton
import triton.language as tl

from fbq_jax.kernels.quantized import Quantized, Unquantized
from fbq_jax.kernels.triton import few_rows_gemm
from fbq_jax.kernels.triton.block_codes import (
    find_amax,
    multiply,
    nearest,
    residual_of,
    scale_and_inverse,
)
from fbq_jax.kernels.triton.few_rows_gemm import (
    Config,
    launch_parts,
    locate_part,
    rows_of_tile,
    stages,
    store_part,
)
from fbq_jax.kernels.triton.gemm import align_rows
from fbq_jax.kernels.triton.gemm_kernel import (
    Problem,
    add_product,
    clamped_range,
    load,
    outer_product,
    scale_offsets,
)
from fbq_jax.kernels.triton.launch import compute_capability


def default_config(
    shape: tuple[int, ...], k: int, *, itemsize: int, sm: int, ordered: bool = False
) -> Config:
    """Chooses the configuration for ``(batch, M, N, K)`` in K blocks of k.

    Tiles and parts of K are as in ``few_rows_gemm``, so that both kernels add in the
    same order.

    Args:
      shape: ``(batch, M, N, K)``.
      k: the length of a K block.
      itemsize: bytes of an element of x.
      sm: compute capability of the GPU times ten.
      ordered: whether programs share no K blocks.
    """
    config = few_rows_gemm.default_config(shape, k, sm=sm, ordered=ordered)
    rows = rows_of_tile(shape[1])
    num_warps = 4 if rows * k <= 2**12 else 8  # a thread holds up to 32 values
    size = (config.BN + rows * itemsize) * k
    return config._replace(num_warps=num_warps, num_stages=stages(size, sm))


def matmul(
    lhs: Unquantized,
    rhs: Quantized,
    *,
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
    ordered: bool = False,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does, for ``M <= m`` or ``m == 1``.

    The result has the bits of ``few_rows_gemm.matmul`` if that has as many splits.

    Args:
      lhs: the left operand ``[B, M, K]``; with fallback, its m is not 1.
      rhs: INT8 codes ``[B, N, K]``, in blocks of ``gemm.matmul``.
      dtype: the dtype of the output.
      sm: as in ``gemm.matmul``.
      config: tuning options.
      ordered: as in ``default_config``.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    sm = sm or compute_capability()
    problem, itemsize = Problem.of(lhs, rhs, sm), lhs.values.dtype.itemsize
    shape = rhs.shape[0], problem.M, problem.N, problem.K
    config = config or default_config(
        shape, problem.k, itemsize=itemsize, sm=sm, ordered=ordered
    )
    arguments = align_rows(lhs.values), lhs.theta
    return launch_parts(
        few_rows_quantize_kernel, arguments, rhs, problem, config, dtype
    )


@triton.jit
def few_rows_quantize_kernel(
    x,
    theta,
    rhs,
    rhs_scales,
    step_count,
    out,
    BM: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
):
    """Computes ``BN`` columns of the output from a part of the K blocks."""
    BN: tl.constexpr = C.BN
    k_blocks: tl.constexpr = (P.K + P.k - 1) // P.k
    at = locate_part(P.N, BN, C.splits)
    split, batch, column = at
    # Rows below the last one repeat it, which changes no maximum.
    i = clamped_range(0, BM, 0, P.M, BM)
    j = clamped_range(0, BN, column, P.N, BN)
    c = tl.arange(0, P.k)
    x_offsets = batch * P.M * P.K + i[None, :] * P.K + c[:, None]
    rhs_offsets = j[:, None] * P.K + c[None, :]
    rhs += (batch * P.N + column) * P.K
    rhs_scales += scale_offsets(batch, column, j, 1, P.N, P.n, BN, k_blocks)
    rhs_stride: tl.constexpr = P.N if P.n == 1 else 1  # from a K block to the next one
    tl.static_assert(P.m >= P.M or (P.m == 1 and not P.fallback))
    if P.fallback:
        limit = tl.load(theta + batch)
        limit = tl.where(limit >= 0.0, limit, 0.0)

    # Beyond the last K block, values and codes are 0.
    ALL: tl.constexpr = k_blocks % C.splits == 0 and P.K % P.k == 0
    first = split * step_count
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, first + step_count):
        inside = c < P.K - step * P.k
        block = step if ALL else tl.minimum(step, k_blocks - 1)
        b = load(rhs + step * P.k + rhs_offsets, inside[None, :], ALL)
        rhs_scale = tl.load(rhs_scales + block * rhs_stride)
        values = (load(x + step * P.k + x_offsets, inside[:, None], ALL),)
        if P.m == 1:
            amax = find_amax(values, 0)
            scale, inverse = scale_and_inverse(amax)
            rounded = nearest(multiply(values, inverse[None, :]))
        else:
            amax = find_amax(values)
            scale, inverse = scale_and_inverse(amax)
            rounded = nearest(multiply(values, inverse))
        both = outer_product(rhs_scale, scale, P.n, P.m)
        acc = add_product(acc, b, rounded[0].to(tl.int8), both, P.magic_conversion)
        if P.fallback:  # noqa: SIM102 (a constant)
            # The second condition is false where scale * 127 overflows.
            if (amax > limit) & (scale * 127.0 < float("inf")):
                rest = residual_of(values, rounded, scale)
                scale, inverse = scale_and_inverse(find_amax(rest))
                codes = nearest(multiply(rest, inverse))[0].to(tl.int8)
                both = outer_product(rhs_scale, scale, P.n, P.m)
                acc = add_product(acc, b, codes, both, P.magic_conversion)

    store_part(out, acc, at, P.M, P.N, C.splits)
