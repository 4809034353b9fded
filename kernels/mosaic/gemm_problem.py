"""Sizes, options and memory shared by the modules of the Hopper GEMM."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

TILE = 128  # rows and columns of an output tile, and elements of K in a step
CONSUMERS = 2  # warpgroups that multiply; each computes half the rows of a tile
CONSUMER_ROWS = TILE // CONSUMERS
UNROLL = 4  # steps in the body of the main loop
PREFETCH = UNROLL + 2  # steps whose scales are loaded before they are needed
PREFETCH_PAD = PREFETCH  # entries after the last step, loaded but not used


class Config(NamedTuple):
    """Tuning options.  They change the speed of the kernel, not its result.

    Attributes:
      group: neighbouring tiles along N that run together, for reuse in the L2 cache.
      cluster: thread blocks in a cluster, 1 or 2.  They are neighbours along N and
        share the tiles of lhs.  If the number of tiles along N is odd, 1 is used.
    """

    group: int
    cluster: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of one GEMM, from which a kernel is built.

    Attributes:
      batch: number of matrices.
      M: rows of the output, a multiple of ``TILE``.
      N: columns of the output, a multiple of ``TILE``.
      K: length of the contraction, a multiple of ``TILE``.
      fallback: whether lhs has a residual.
      dtype: dtype of the output, with 2 or 4 bytes.
      config: tuning options.
      num_sms: streaming multiprocessors of the GPU.
    """

    batch: int
    M: int
    N: int
    K: int
    fallback: bool
    dtype: jnp.dtype
    config: Config
    num_sms: int

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along M, and clusters of tiles along N."""
        return self.M // TILE, self.N // TILE // self.config.cluster

    @property
    def cluster_tiles(self) -> int:
        """Clusters of tiles in the output."""
        return self.batch * self.grid[0] * self.grid[1]

    @property
    def num_clusters(self) -> int:
        """Clusters of thread blocks that run concurrently."""
        return self.num_sms // self.config.cluster

    @property
    def num_stages(self) -> int:
        """Pipeline stages: as many as fit into shared memory beside the output tile."""
        return 6 if self.dtype.itemsize == 2 else 5

    @property
    def running_sums(self) -> bool:
        """Whether accumulators sum several steps, which 16-bit outputs allow."""
        return self.dtype.itemsize == 2

    @property
    def lhs_bounds_sums(self) -> bool:
        """Whether reset intervals come from the codes of lhs; otherwise from rhs.

        The smaller operand is cheaper to scan, but lhs must have only one term.
        """
        return self.M < self.N and not self.fallback


class Operands(NamedTuple):
    """The operands of the kernel: arrays outside it, references to them inside.

    ``S`` is the length of the step lists: ``2 K/128 + PREFETCH_PAD`` with a residual,
    and ``K/128 + PREFETCH_PAD`` without.

    Attributes:
      lhs: int8 ``[B, M, K]``, codes.
      residual: int8 ``[B, M, K]``, codes of the second term of lhs, or None.
      order: int32 ``[B, M/128, S]`` of ``list_steps``, or None without residual.
      lhs_scales: float32 ``[B, M/128, S]``, the scale of lhs in each step.
      counts: int32 ``[B, M/128]``, number of steps, or None without residual.
      regular_counts: int32 ``[B, M/128]``, number of steps before the outlier steps, or
        None without residual.
      rhs: int8 ``[B, N, K]``, codes.
      rhs_scales: float32 ``[B, N/128, K/128]``, padded to ``S`` without residual.
      reset_intervals: int32 ``[B, M/128]`` if ``Problem.lhs_bounds_sums``, or else
        ``[B, N/128]``: iterations of the main loop after which the running sums are
        reset.  None for an output of 4 bytes.
    """

    lhs: Any
    residual: Any
    order: Any
    lhs_scales: Any
    counts: Any
    regular_counts: Any
    rhs: Any
    rhs_scales: Any
    reset_intervals: Any


class Buffers(NamedTuple):
    """Shared memory and barriers of a thread block.

    Attributes:
      lhs: int8 ``[stages, 128, 128]``, tiles of lhs or of its residual.
      rhs: int8 ``[stages, 128, 128]``, tiles of rhs.
      out: ``[CONSUMERS, 64, 128]``, the output tile.
      full: barriers, one per stage: both tiles have arrived.
      empty: barriers, one per stage: all consumers have read both tiles.
    """

    lhs: Any
    rhs: Any
    out: Any
    full: Any
    empty: Any


def buffer_types(problem: Problem) -> Buffers:
    """The shared memory and barriers to allocate."""
    stages, dtype = problem.num_stages, problem.dtype
    codes = plgpu.SMEM((stages, TILE, TILE), jnp.int8, transforms=_swizzle(1))
    out = plgpu.SMEM(
        (CONSUMERS, CONSUMER_ROWS, TILE), dtype, transforms=_swizzle(dtype.itemsize)
    )
    full = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    arrivals: Any = {"num_arrivals": CONSUMERS, "num_barriers": stages}
    empty = (
        plgpu.ClusterBarrier(collective_axes=("block",), **arrivals)
        if problem.config.cluster > 1
        else plgpu.Barrier(**arrivals)
    )
    return Buffers(codes, codes, out, full, empty)


def _swizzle(itemsize: int) -> tuple[Any, ...]:
    """The layout of rows of 128 bytes that both TMA and WGMMA read."""
    return plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128)
