"""The GEMMs of rows in groups, each with its own matrix, on Hopper.

They are the GEMM of ``gemm_kernel`` with one more list: the group of each row of tiles,
which selects a matrix of rhs; or, where the contraction is in groups, the steps of each
output.  The kernel reads the list, so the sizes of the groups need neither the host nor
another program, and tiles without rows take no time.
"""

import jax
import jax.numpy as jnp

from fbq_jax.kernels.mosaic.gemm import (
    make_operands,
    make_problem,
    scales_of_tiles,
)
from fbq_jax.kernels.mosaic.gemm_kernel import build
from fbq_jax.kernels.mosaic.gemm_problem import BLOCK, SUM_CHUNK, Config, Operands
from fbq_jax.kernels.quantized import Quantized, product_sides
from fbq_jax.kernels.tiles import tile_ranges


def matmul(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does with groups; blocks as in ``gemm``.

    Products of tiles without a group are not written.

    Args:
      lhs: tiles ``[T, m, K]``, with m a multiple of 128.
      rhs: the matrices ``[G, N, K]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      dtype: the dtype of the output, with 2 or 4 bytes.
      config: as in ``gemm.matmul``.

    Returns:
      ``[T, m, N]`` in ``dtype``.
    """
    (tiles, m, K), (size, N, _) = lhs.shape, rhs.shape
    flat = jax.tree.map(lambda x: x.reshape(1, -1, x.shape[2]), lhs)
    problem = make_problem(flat, rhs, 1, (tiles * m, N, K), dtype, config)
    first = jnp.sum(groups < 0, dtype=jnp.int32)
    count = jnp.sum((groups >= 0) & (groups < size), dtype=jnp.int32)
    operands = make_operands(problem, flat, rhs)
    if problem.row_scales != "none":  # as quantize stores them, without a copy
        block = product_sides(lhs, rhs)[:2]
        scales = scales_of_tiles(lhs.main, block, m, problem.K, per_row=True)
        operands = operands._replace(lhs_scales=scales)
    operands = _with_few_sums(operands)._replace(
        # Thread blocks without a tile look at one, which must be valid.
        groups=jnp.repeat(jnp.clip(groups, 0, size - 1), m // BLOCK),
        row_range=m // BLOCK * jnp.stack([jnp.minimum(first, tiles - 1), count]),
    )
    return build(problem)(operands).reshape(tiles, m, problem.N)[:, :, :N]


def contract(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
) -> jax.Array:
    """Contracts as ``reference.contract`` does; blocks as in ``gemm``.

    Args:
      lhs: tiles ``[T, K, m]``, of one term, with m a multiple of 128.
      rhs: tiles ``[T, N, m]``, of one term.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
      dtype: the dtype of the output, with 2 or 4 bytes.
      config: as in ``gemm.matmul``.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    (tiles, K, m), N = lhs.shape, rhs.shape[1]
    problem = make_problem(lhs, rhs, size, (K, N, tiles * m), dtype, config)
    operands = _with_few_sums(make_operands(problem, lhs, rhs))
    has_row_scales = problem.row_scales != "none", problem.row_scales == "both"
    operands = operands._replace(
        lhs_scales=_along_k(operands.lhs_scales, has_row_scales[0]),
        rhs_scales=_along_k(operands.rhs_scales, has_row_scales[1]),
        step_ranges=m // BLOCK * tile_ranges(groups, size),
    )
    return build(problem)(operands)[:, :K, :N]


def _with_few_sums(operands: Operands) -> Operands:
    """Replaces many sums of rhs by the largest of each ``SUM_CHUNK``.

    Every thread block reads all of them, and experts have many.
    """
    if operands.rhs_sums is None:
        return operands
    sums = operands.rhs_sums
    padded = jnp.pad(sums, (0, -sums.size % SUM_CHUNK))
    return operands._replace(rhs_sums=jnp.max(padded.reshape(-1, SUM_CHUNK), axis=0))


def _along_k(scales: jax.Array, per_row: bool) -> jax.Array:
    """Joins the scales of T matrices along K, to the scales of one matrix."""
    if not per_row:
        scales = scales.transpose(1, 0, 2).reshape(1, scales.shape[1], -1)
    return scales.reshape(1, -1, scales.shape[2])
