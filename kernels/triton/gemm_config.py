"""Tuning options of the Triton GEMM, and their choice."""

from typing import NamedTuple

import triton

from fbq_jax.kernels import tuning_table

# Bytes of shared memory for tiles of operands. The smallest GPUs, of compute capability
# 8.6 and 8.9, let a program have 99 KiB.
_TILE_BYTES = 96 * 1024


class Config(NamedTuple):
    """Tuning options.  They change the speed of the kernel, not its result.

    Attributes:
      BM: rows of a tile.
      BN: columns of a tile.
      halves: 1, or 2 to multiply the upper and the lower half of a tile one after the
        other, so that registers hold the INT32 products of one half only.  2 needs
        ``BM <= m``.
      num_warps: warps per program.
      num_stages: depth of the pipeline of loads.
      group: rows of tiles that run together, for reuse in the L2 cache.
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
    """The tuned configuration for a shape, or a default that suits most shapes.

    Args:
      sizes: ``(M, N, K)``.
      block_shape: ``(m, k, n)``, the size of a block along M, K and N.
      sm: compute capability of the GPU times ten.
      fallback: whether there is a residual.
    """
    op = "triton.matmul.fallback" if fallback else "triton.matmul"
    if block_shape == (128, 128, 128) and (found := tuning_table.lookup(op, sizes)):
        return Config(**found)
    return default_config(sizes, block_shape, sm)


def default_config(
    sizes: tuple[int, int, int], block_shape: tuple[int, int, int], sm: int
) -> Config:
    """The configuration for shapes that are not in the table."""
    M, N, _ = sizes
    m, k, _ = block_shape
    hopper = sm == 90
    if hopper and m >= 128 and k <= 128 and min(M, N) >= 128:
        return Config(128, 128, 2, 4, 3, group=16)
    BM, BN = (64, 128) if hopper or k == 256 else (128, 128)
    BM = min(BM, max(32, triton.next_power_of_2(M)))
    BN = min(BN, max(32, triton.next_power_of_2(N)))
    # Triton keeps num_stages tiles in shared memory on Hopper, one fewer on older GPUs.
    num_stages = min(4, _TILE_BYTES // ((BM + BN) * k)) + (not hopper)
    return Config(BM, BN, 1, 4 if hopper else 8, num_stages, group=8)
