"""The GEMM with block scales for a few rows, which reads rhs once.

With few rows, the time is that of reading rhs from memory.  So a program computes all
rows of a narrow range of columns, for a part of the K blocks if there are too few
columns to keep every multiprocessor reading.  XLA then sums the parts, in the operation
that reads them.  The tile is transposed, because tensor cores multiply at least 16 rows
by at least 8 columns.  All rows are in one block of lhs, or each row has its own
scales.  A program multiplies the residual only in steps with one that is used.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.experimental.pallas import cdiv

from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.triton.gemm import align, row_scales_last
from fbq_jax.kernels.triton.gemm_kernel import (
    add_product,
    clamped_range,
    load,
    outer_product,
    scale_offsets,
)
from fbq_jax.kernels.triton.launch import compute_capability, launch

BlockShape = tuple[int, int, int]

_LEAST_BLOCKS = 8  # of the K blocks of a program
# Bytes of shared memory that loads may take, of a GPU of compute capability 9.0 or
# above and of others.
_SHARED_MEMORY = 200 * 2**10, 96 * 2**10


class Config(NamedTuple):
    """Tuning options.  They change the speed of the kernel, and the order of its sums.

    Attributes:
      BN: columns of a tile.
      splits: programs that share the K blocks of a tile.
      num_warps: warps per program.
      num_stages: depth of the pipeline of loads.
    """

    BN: int
    splits: int
    num_warps: int
    num_stages: int


def default_config(shape: tuple[int, ...], k: int, *, sm: int) -> Config:
    """Chooses the configuration for ``(batch, M, N, K)`` in K blocks of k."""
    batch, M, N, K = shape
    rows = rows_of_tile(M)
    columns = 64
    # So many programs keep the memory of a GPU with some 130 multiprocessors busy.
    splits = (256 if rows == 128 else 512) // (batch * cdiv(N, columns))
    splits = max(1, min(splits, cdiv(K, k) // _LEAST_BLOCKS))
    # Most K are a multiple of a power of two of K blocks.
    splits = 2 ** (splits.bit_length() - 1)
    num_warps = 4 if rows * k <= 2**14 else 8  # or registers would spill
    return Config(columns, splits, num_warps, stages((columns + rows) * k, sm))


def stages(size: int, sm: int) -> int:
    """The depth of the pipeline of loads of ``size`` bytes in each step."""
    return max(2, min(4, _SHARED_MEMORY[sm < 90] // size))


def rows_of_tile(M: int) -> int:
    """The rows of a tile with all M rows."""
    return max(8, triton.next_power_of_2(M))


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
    m, k, _ = block_shape
    batch, M, K = lhs.codes.shape
    sizes = batch, M, rhs.codes.shape[1], K
    fallback = residual is not None
    config = config or default_config(sizes, k, sm=sm)
    lhs = align(lhs)
    second = lhs if residual is None else align(residual)  # not read without one
    lhs, second = row_scales_last(lhs, m), row_scales_last(second, m)
    return launch_parts(
        few_rows_kernel,
        (*lhs[:2], *second[:2]),
        rhs,
        sizes,
        block_shape=block_shape,
        dtype=dtype,
        fallback=fallback,
        sm=sm,
        config=config,
    )


def launch_parts(
    kernel: triton.JITFunction,
    lhs: tuple[jax.Array, ...],
    rhs: Quantized,
    sizes: tuple[int, int, int, int],
    *,
    block_shape: BlockShape,
    dtype: jax.typing.DTypeLike,
    fallback: bool,
    sm: int,
    config: Config,
) -> jax.Array:
    """Runs a kernel on each part of the K blocks of each tile, and sums the parts.

    Args:
      kernel: takes lhs, rhs, the number of K blocks of a part and the output.
      lhs: its arguments that belong to lhs, whose rows have aligned lengths.
      rhs: as in ``matmul``.
      sizes: ``(batch, M, N, K)``.
      block_shape: as in ``matmul``.
      dtype: as in ``matmul``.
      fallback: whether blocks of lhs may have a second term.
      sm: as in ``matmul``.
      config: tuning options.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    batch, M, N, K = sizes
    m, k, n = block_shape
    BN, splits, num_warps, num_stages = config
    rhs = align(rhs)
    (parts,) = launch(
        kernel,
        *lhs,
        *row_scales_last(rhs, n)[:2],
        cdiv(cdiv(K, k), splits),
        outputs=[
            jax.ShapeDtypeStruct(
                (splits, batch, M, N), dtype if splits == 1 else jnp.float32
            )
        ],
        grid=(splits * batch * cdiv(N, BN),),
        num_warps=num_warps,
        num_stages=num_stages,
        waits=True,
        M=M,
        N=N,
        K=rhs.codes.shape[2],
        m=m,
        k=k,
        n=n,
        BM=rows_of_tile(M),
        BN=BN,
        SPLITS=splits,
        FALLBACK=fallback,
        # Before Ada, the conversion of an integer to a float is slow.
        MAGIC_CONVERSION=sm < 89,
    )
    return parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(dtype)


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
    SPLITS: tl.constexpr,
    FALLBACK: tl.constexpr,
    MAGIC_CONVERSION: tl.constexpr,
):
    """Computes ``BN`` columns of the output from a part of the K blocks."""
    k_blocks: tl.constexpr = (K + k - 1) // k
    at = locate_part(N, BN, SPLITS)
    split, batch, column = at
    i = clamped_range(0, BM, 0, M, BM)
    j = clamped_range(0, BN, column, N, BN)
    c = tl.arange(0, k)
    lhs_offsets = batch * M * K + i[None, :] * K + c[:, None]
    rhs_offsets = j[:, None] * K + c[None, :]
    rhs += (batch * N + column) * K
    tl.static_assert(m == 1 or m >= M)
    lhs_rows = scale_offsets(batch, 0, i, 0, M, m, min(m, BM), k_blocks)
    lhs_scales += lhs_rows
    residual_scales += lhs_rows
    rhs_scales += scale_offsets(batch, column, j, 1, N, n, BN, k_blocks)
    lhs_stride: tl.constexpr = M if m == 1 else 1  # from a K block to the next one
    rhs_stride: tl.constexpr = N if n == 1 else 1

    # Beyond the last K block, codes are 0.
    ALL: tl.constexpr = k_blocks % SPLITS == 0 and K % k == 0
    first = split * step_count
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, first + step_count):
        inside = c < K - step * k
        block = step if ALL else tl.minimum(step, k_blocks - 1)
        b = load(rhs + step * k + rhs_offsets, inside[None, :], ALL)
        scale = tl.load(rhs_scales + block * rhs_stride)
        a = load(lhs + step * k + lhs_offsets, inside[:, None], ALL)
        lhs_scale = tl.load(lhs_scales + block * lhs_stride)
        both = outer_product(scale, lhs_scale, n, m)
        acc = add_product(acc, b, a, both, MAGIC_CONVERSION)
        if FALLBACK:
            # The codes of an unused residual are arbitrary, and its scale is 0.
            lhs_scale = tl.load(residual_scales + block * lhs_stride)
            used = tl.max(lhs_scale != 0.0, 0) if m == 1 else lhs_scale != 0.0
            if used:
                a = load(residual + step * k + lhs_offsets, inside[:, None], ALL)
                both = outer_product(scale, lhs_scale, n, m)
                acc = add_product(acc, b, a, both, MAGIC_CONVERSION)

    store_part(out, acc, at, M, N, SPLITS)


@triton.jit
def locate_part(N: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr):
    """The part of the K blocks, the batch index and the first column of a program."""
    tiles: tl.constexpr = (N + BN - 1) // BN
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    return split, (tile // tiles).to(tl.int64), tile % tiles * BN


@triton.jit
def store_part(out, acc, at, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr):
    """Stores the transposed tile of the program ``at``, which ``locate_part`` found."""
    split, batch, column = at
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    tiles: tl.constexpr = (N + BN - 1) // BN
    batches = tl.num_programs(0) // (tiles * SPLITS)
    out += (split * batches + batch) * M * N + column
    row, across = tl.arange(0, BM)[None, :], tl.arange(0, BN)[:, None]
    inside = (row < M) & (across < N - column)
    tl.store(out + row * N + across, acc.to(out.dtype.element_ty), inside)
