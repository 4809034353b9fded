"""The GEMM with block scales for a few rows, which reads rhs once.

With few rows, the time goes into reading rhs from memory.  So a program computes all
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

from fbq_jax.kernels.quantized import Quantized
from fbq_jax.kernels.triton.gemm import pack
from fbq_jax.kernels.triton.gemm_kernel import (
    Problem,
    add_product,
    clamped_range,
    load,
    outer_product,
    scale_offsets,
)
from fbq_jax.kernels.triton.launch import compute_capability, launch

_LEAST_BLOCKS = 8  # of the K blocks of a program
# Bytes of shared memory that loads may take, of a GPU of compute capability 9.0 or
# above and of others.
_SHARED_MEMORY = 200 * 2**10, 96 * 2**10


class Config(NamedTuple):
    """Tuning options.

    They change the speed of the kernel, and ``splits`` also the order of its sums.

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


def default_config(
    shape: tuple[int, ...],
    k: int,
    *,
    sm: int,
    ordered: bool = False,
    codes: jax.typing.DTypeLike = jnp.int8,
) -> Config:
    """Chooses the configuration for ``(batch, M, N, K)`` in K blocks of k.

    If sums are ordered, programs share no K blocks.
    """
    batch, M, N, K = shape
    rows = rows_of_tile(M, codes)
    columns = 64
    # Sums of FP8 codes are rounded, in another way by the instruction for 32 columns.
    exact = jnp.issubdtype(codes, jnp.integer)
    if ordered and exact and batch * cdiv(N, columns) < 256:
        columns = 32
    # So many programs keep the memory of a GPU with some 130 multiprocessors busy.
    splits = (256 if rows == 128 else 512) // (batch * cdiv(N, columns))
    splits = max(1, min(splits, 1 if ordered else cdiv(K, k) // _LEAST_BLOCKS))
    # Most K are a multiple of a power of two of K blocks.
    splits = 2 ** (splits.bit_length() - 1)
    num_warps = 4 if rows * k <= 2**14 else 8  # or registers would spill
    return Config(columns, splits, num_warps, stages((columns + rows) * k, sm))


def stages(size: int, sm: int) -> int:
    """The depth of the pipeline of loads of ``size`` bytes in each step."""
    return max(2, min(4, _SHARED_MEMORY[sm < 90] // size))


def rows_of_tile(M: int, codes: jax.typing.DTypeLike = jnp.int8) -> int:
    """The rows of a tile with all M rows."""
    # Triton would multiply 8 rows of FP8 codes as float16, with other roundings.
    least = 8 if jnp.issubdtype(codes, jnp.integer) else 16
    return max(least, triton.next_power_of_2(M))


def matmul(
    lhs: Quantized,
    rhs: Quantized,
    *,
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
    ordered: bool = False,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does, for ``M <= m`` or ``m == 1``.

    The arguments are as in ``gemm.matmul``; ordered sums have the bits of its result.
    """
    sm = sm or compute_capability()
    problem = Problem.of(lhs, rhs, sm)
    shape = rhs.shape[0], problem.M, problem.N, problem.K
    config = config or default_config(
        shape, problem.k, sm=sm, ordered=ordered, codes=rhs.codes.dtype
    )
    terms = [pack(term, problem.m) for term in lhs.terms]
    # Without a residual, the first term takes its place and is not read.
    arguments = *terms[0], *terms[-1]
    return launch_parts(few_rows_kernel, arguments, rhs, problem, config, dtype)


def launch_parts(
    kernel: triton.JITFunction,
    arguments: tuple[jax.Array, ...],
    rhs: Quantized,
    problem: Problem,
    config: Config,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Runs a kernel on each part of the K blocks of each tile, and sums the parts.

    Args:
      kernel: takes lhs, rhs, the number of K blocks of a part and the output.
      arguments: the arrays that the kernel takes for lhs.
      rhs: the right operand ``[B, N, K]``.
      problem: the GEMM.
      config: tuning options.
      dtype: the dtype of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    batch, splits = rhs.shape[0], config.splits
    M, N, K, _, k, n, *_ = problem
    part_dtype = dtype if splits == 1 else jnp.float32
    (parts,) = launch(
        kernel,
        *arguments,
        *pack(rhs.main, n),
        cdiv(cdiv(K, k), splits),
        outputs=[jax.ShapeDtypeStruct((splits, batch, M, N), part_dtype)],
        grid=(splits * batch * cdiv(N, config.BN),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        BM=rows_of_tile(M, rhs.codes.dtype),
        P=problem,
        C=config,
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
    BM: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
):
    """Computes ``BN`` columns of the output from a part of the K blocks."""
    BN: tl.constexpr = C.BN
    k_blocks: tl.constexpr = (P.K + P.k - 1) // P.k
    at = locate_part(P.N, BN, C.splits)
    split, batch, column = at
    i = clamped_range(0, BM, 0, P.M, BM)
    j = clamped_range(0, BN, column, P.N, BN)
    c = tl.arange(0, P.k)
    lhs_offsets = batch * P.M * P.K + i[None, :] * P.K + c[:, None]
    rhs_offsets = j[:, None] * P.K + c[None, :]
    rhs += (batch * P.N + column) * P.K
    tl.static_assert(P.m == 1 or P.m >= P.M)
    lhs_rows = scale_offsets(batch, 0, i, 0, P.M, P.m, min(P.m, BM), k_blocks)
    lhs_scales += lhs_rows
    residual_scales += lhs_rows
    rhs_scales += scale_offsets(batch, column, j, 1, P.N, P.n, BN, k_blocks)
    lhs_stride: tl.constexpr = P.M if P.m == 1 else 1  # from a K block to the next one
    rhs_stride: tl.constexpr = P.N if P.n == 1 else 1

    # Beyond the last K block, codes are 0.
    ALL: tl.constexpr = k_blocks % C.splits == 0 and P.K % P.k == 0
    first = split * step_count
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, first + step_count):
        inside = c < P.K - step * P.k
        block = step if ALL else tl.minimum(step, k_blocks - 1)
        b = load(rhs + step * P.k + rhs_offsets, inside[None, :], ALL)
        scale = tl.load(rhs_scales + block * rhs_stride)
        a = load(lhs + step * P.k + lhs_offsets, inside[:, None], ALL)
        lhs_scale = tl.load(lhs_scales + block * lhs_stride)
        both = outer_product(scale, lhs_scale, P.n, P.m)
        acc = add_product(acc, b, a, both, P.magic_conversion)
        if P.fallback:
            # The codes of an unused residual are arbitrary, and its scale is 0.
            lhs_scale = tl.load(residual_scales + block * lhs_stride)
            used = tl.max(lhs_scale != 0.0, 0) if P.m == 1 else lhs_scale != 0.0
            if used:
                a = load(residual + step * P.k + lhs_offsets, inside[:, None], ALL)
                both = outer_product(scale, lhs_scale, P.n, P.m)
                acc = add_product(acc, b, a, both, P.magic_conversion)

    store_part(out, acc, at, P.M, P.N, C.splits)


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
