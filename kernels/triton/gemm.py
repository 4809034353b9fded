"""The INT8 GEMM with block scales and fallback: ``reference.matmul`` in Triton.

A program computes one tile of the output.  Its loop takes one K block a step: an exact
integer product on the tensor cores, scaled and added to a float32 accumulator.  That
promotion keeps the program from its next product, so tiles are small enough for two or
three programs to share a multiprocessor, one's promotion under another's products.

With fallback the loop walks the lists of ``steps``: a step is a K block of the first
term or of the residual, told apart by the address it loads from, and not by a branch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import tuning_table
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.triton.gemm_schedule import steps
from fbq_jax.kernels.triton.launch import launch


class Config(NamedTuple):
    """How a GEMM is cut into programs; what a tuner chooses.

    Attributes:
      BM: rows of a tile.
      BN: columns of a tile.
      halves: 2 to multiply the upper and lower half of a tile one after the other, so
        that registers hold the integers of one of them; needs BM <= m.  Else 1.
      num_warps: of a program.
      num_stages: depth of the pipeline of loads.
      group: rows of tiles that go together, so that they share operands in the L2.
    """

    BM: int
    BN: int
    halves: int
    num_warps: int
    num_stages: int
    group: int


def choose_config(
    sizes: tuple[int, int, int],
    block_shape: tuple[int, int, int],
    sm: int,
    *,
    fallback: bool,
) -> Config:
    """The table's configuration, or one that suits most shapes.

    Args:
      sizes: ``(M, N, K)``.
      block_shape: ``(m, k, n)``, the sides of a block.
      sm: compute capability of the GPU, times ten.
      fallback: whether there is a residual.
    """
    M, N, _ = sizes
    m, k, _ = block_shape
    op = "triton.matmul.fallback" if fallback else "triton.matmul"
    if block_shape == (128, 128, 128) and (found := tuning_table.lookup(op, sizes)):
        return Config(**found)
    hopper = sm == 90
    if hopper and m >= 128 and k <= 128 and min(M, N) >= 128:
        return Config(128, 128, 2, 4, 3, group=16)
    BM, BN = (64, 128) if hopper or k == 256 else (128, 128)
    BM = min(BM, max(32, triton.next_power_of_2(M)))
    BN = min(BN, max(32, triton.next_power_of_2(N)))
    # Triton keeps num_stages tiles in shared memory for Hopper's products, one fewer
    # for older ones.
    budget = 96 * 1024
    num_stages = min(4, budget // ((BM + BN) * k)) + (not hopper)
    return Config(BM, BN, 1, 4 if hopper else 8, num_stages, group=8)


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
    """As ``reference.matmul``.

    Args:
      lhs: codes ``[B, M, K]``, scales ``[B, ceil(M/m), ceil(K/k)]``.
      residual: a second term of lhs, of the same shapes, or None.
      rhs: codes ``[B, N, K]``, scales ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``, the sides of a block: 32, 64, 128 or 256.
      dtype: of the output.
      sm: compute capability of the GPU it will run on, times ten; None for that of this
        process's first device.
      config: how it is cut into programs; by default ``choose_config``'s.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    if sm is None:
        sm = int(jax.local_devices()[0].compute_capability.replace(".", ""))
    m, k, n = block_shape
    batch, M, K = lhs.codes.shape
    N = rhs.codes.shape[1]
    tile = config or choose_config(
        (M, N, K), block_shape, sm, fallback=residual is not None
    )
    BM, BN = tile.BM, tile.BN
    lhs, rhs = _align(lhs), _align(rhs)
    if residual is None:
        # Stand-ins for what will not be read.
        second, lists = lhs, (lhs.scales, lhs.scales, lhs.scales)
    else:
        second, lists = _align(residual), _tile_steps(lhs, residual, -(-BM // m))
    (out,) = launch(
        _matmul,
        *lhs,
        *second,
        *lists,
        *rhs,
        -(-K // k),
        outputs=[jax.ShapeDtypeStruct((batch, M, N), dtype)],
        grid=(batch * -(-M // BM) * -(-N // BN),),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        M=M,
        N=N,
        K=lhs.codes.shape[2],
        m=m,
        k=k,
        n=n,
        BM=BM,
        BN=BN,
        HALVES=tile.halves,
        GROUP=tile.group,
        FALLBACK=residual is not None,
        # Before Ada, the conversion of an integer to a float is slow.
        FLOAT_BITS=sm < 89,
    )
    return out


def _align(operand: Quantized) -> Quantized:
    """Pads codes so that each row starts where a vector load can."""
    padding = -operand.codes.shape[2] % 16
    if padding:
        codes = jnp.pad(operand.codes, ((0, 0), (0, 0), (0, padding)))
        return Quantized(codes, operand.scales)
    return operand


def _tile_steps(
    lhs: Quantized, residual: Quantized, row_blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lists of a tile: of its row block, or of all its blocks together.

    What a residual not taken has for codes is then multiplied by its scale, 0.
    """
    scales, taken = lhs.scales, residual.scales
    if row_blocks > 1:
        batch, rows, columns = taken.shape
        taken = (taken != 0.0).astype(jnp.float32)
        taken = jnp.pad(taken, ((0, 0), (0, -rows % row_blocks), (0, 0)))
        taken = jnp.max(taken.reshape(batch, -1, row_blocks, columns), axis=2)
        scales = jnp.zeros_like(taken)
    order, scales, counts, _ = steps(scales, taken)
    return order, scales, counts


@triton.jit
def _matmul(
    lhs,
    lhs_scales,
    residual,
    residual_scales,
    order,
    step_scales,
    counts,
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
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    FALLBACK: tl.constexpr,
    FLOAT_BITS: tl.constexpr,
):
    # Sizes are constants for the sake of registers: what they multiply is folded into
    # the addresses.  The number of steps is not, lest the loop be unrolled.
    row_tiles: tl.constexpr = (M + BM - 1) // BM
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    k_blocks: tl.constexpr = (K + k - 1) // k
    band: tl.constexpr = GROUP * column_tiles
    batch = (tl.program_id(0) // (row_tiles * column_tiles)).to(tl.int64)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    height = tl.minimum(row_tiles - tile // band * GROUP, GROUP)
    row = (tile // band * GROUP + tile % band % height) * BM
    column = tile % band // height * BN

    # Beyond an edge the last row is repeated; it is not stored.
    HALF: tl.constexpr = BM // HALVES
    i = tl.arange(0, HALF)
    lower_i = i + HALF
    if M % BM != 0:
        i = tl.minimum(i, M - 1 - row)
        lower_i = tl.minimum(lower_i, M - 1 - row)
    j = tl.arange(0, BN)
    if N % BN != 0:
        j = tl.minimum(j, N - 1 - column)
    c = tl.arange(0, k)
    lhs += (batch * M + row) * K
    residual += (batch * M + row) * K
    rhs += (batch * N + column) * K
    lhs_offsets = i[:, None] * K + c[None, :]
    lower_offsets = lower_i[:, None] * K + c[None, :]
    rhs_offsets = c[:, None] + j[None, :] * K

    # One scale for a tile inside a block; else one for each row or column.
    lhs_blocks = batch * ((M + m - 1) // m)
    if m >= BM:
        lhs_blocks += row // m
    else:
        tl.static_assert(HALVES == 1)
        lhs_blocks += ((row + i) // m)[:, None]
    lhs_scales += lhs_blocks * k_blocks
    residual_scales += lhs_blocks * k_blocks
    rhs_blocks = batch * ((N + n - 1) // n)
    if n >= BN:
        rhs_blocks += column // n
    else:
        rhs_blocks += ((column + j) // n)[None, :]
    rhs_scales += rhs_blocks * k_blocks

    if FALLBACK:
        span: tl.constexpr = max(m, BM)
        list_index = batch * ((M + span - 1) // span) + row // span
        order += list_index * 2 * k_blocks
        step_scales += list_index * 2 * k_blocks
        step_count = tl.load(counts + list_index)
        next_entry = tl.load(order)

    acc = tl.zeros((HALF, BN), tl.float32)
    lower_acc = acc
    for step in range(step_count):
        if FALLBACK:
            # Read a step ahead: the addresses of this step's loads wait for it.
            entry = next_entry
            next_entry = tl.load(order + tl.minimum(step + 1, step_count - 1))
            main = (entry & 1) == 0
            block = entry >> 1
            codes = tl.where(main, lhs, residual)
            if m >= BM:
                lhs_scale = tl.load(step_scales + step)
            else:
                lhs_scale = tl.load(tl.where(main, lhs_scales, residual_scales) + block)
        else:
            block = step
            codes = lhs
            lhs_scale = tl.load(lhs_scales + block)
        scale = lhs_scale * tl.load(rhs_scales + block)
        inside = c < K - block * k
        codes += block * k
        a = _load(codes + lhs_offsets, inside[None, :], K % k == 0)
        b = _load(rhs + block * k + rhs_offsets, inside[:, None], K % k == 0)
        acc = _add_product(acc, a, b, scale, FLOAT_BITS)
        if HALVES == 2:
            a = _load(codes + lower_offsets, inside[None, :], K % k == 0)
            lower_acc = _add_product(lower_acc, a, b, scale, FLOAT_BITS)

    i = tl.arange(0, HALF)
    j = tl.arange(0, BN)
    out += (batch * M + row) * N + column
    places = i[:, None] * N + j[None, :]
    columns = (j < N - column)[None, :]
    dtype = out.dtype.element_ty
    tl.store(out + places, acc.to(dtype), (i < M - row)[:, None] & columns)
    if HALVES == 2:
        out += HALF * N
        rows = (i < M - row - HALF)[:, None]
        tl.store(out + places, lower_acc.to(dtype), rows & columns)


@triton.jit
def _load(pointers, inside, ALL: tl.constexpr):
    if ALL:
        return tl.load(pointers)
    else:  # noqa: RET505 (only one of them is compiled)
        return tl.load(pointers, inside, 0)


@triton.jit
def _add_product(acc, a, b, scale, FLOAT_BITS: tl.constexpr):
    if FLOAT_BITS:
        # The bits of 1.5 * 2**23 + x, a float32, are those of 1.5 * 2**23 plus x while
        # |x| <= 2**22; 256 * 128 * 127, the largest sum, is less.
        start = tl.full(acc.shape, 0x4B400000, tl.int32)
        product = tl.dot(a, b, start, out_dtype=tl.int32)
        product = product.to(tl.float32, bitcast=True) - 12582912.0
    else:
        product = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    return tl.fma(product, scale, acc)
