"""The INT8 GEMMs of rows in groups, each with its own matrix, on Hopper.

They are the GEMM of ``gemm_kernel`` with one more list: the group of each row of tiles,
which selects a matrix of rhs; or, where the contraction is in groups, the steps of each
output.  The kernel reads the list, so the sizes of the groups need neither the host nor
another program, and tiles without rows take no time.
"""

import jax
import jax.numpy as jnp

from fbq_jax.kernels.grouped_reference import tile_ranges
from fbq_jax.kernels.mosaic.gemm import (
    make_operands,
    make_problem,
    multiply,
    pad_codes,
    scale_per_tile,
    sums_of,
)
from fbq_jax.kernels.mosaic.gemm_problem import (
    BLOCK,
    SUM_CHUNK,
    Config,
    Operands,
    Problem,
)
from fbq_jax.kernels.reference import Quantized


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``grouped_reference.ragged_matmul`` does.

    Products of tiles without a group are not written.  If N or K is not a multiple of
    128, codes are copied and padded with zeros.

    Args:
      lhs: codes int8 ``[T, m, K]``, scales float32 ``[T, 1, ceil(K/k)]``.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes int8 ``[G, N, K]``, scales float32 ``[G, ceil(N/n), ceil(K/k)]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      block_shape: ``(m, k, n)``, each a multiple of 128.
      dtype: dtype of the output, with 2 or 4 bytes.
      config: tuning options; by default those in the table.

    Returns:
      ``[T, m, N]`` in ``dtype``.
    """
    tiles, m, K = lhs.codes.shape
    size, N, _ = rhs.codes.shape
    per_tile = m // BLOCK
    fallback = residual is not None
    problem = make_problem(1, (tiles * m, N, K), dtype, config, fallback=fallback)
    lhs, residual = jax.tree.map(
        lambda x: x.reshape(1, -1, x.shape[2]), (lhs, residual)
    )
    operands = make_operands(problem, lhs, residual, rhs, block_shape)
    first = jnp.sum(groups < 0, dtype=jnp.int32)
    count = jnp.sum((groups >= 0) & (groups < size), dtype=jnp.int32)
    y = multiply(
        problem,
        operands._replace(
            rhs_sums=_largest(operands.rhs_sums),
            # Thread blocks without a tile look at one, which must be valid.
            groups=jnp.repeat(jnp.clip(groups, 0, size - 1), per_tile),
            row_range=per_tile * jnp.stack([jnp.minimum(first, tiles - 1), count]),
        ),
    )
    return y.reshape(tiles, m, problem.N)[:, :, :N]


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
) -> jax.Array:
    """Contracts as ``grouped_reference.ragged_contraction`` does.

    If K or N is not a multiple of 128, codes are copied and padded with zeros.

    Args:
      lhs: codes int8 ``[T, K, m]``, scales float32 ``[T, ceil(K/k), 1]``.
      rhs: codes int8 ``[T, N, m]``, scales float32 ``[T, ceil(N/n), 1]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
      block_shape: ``(k, m, n)``, each a multiple of 128.
      dtype: dtype of the output, with 2 or 4 bytes.
      config: tuning options; by default those in the table.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    tiles, K, m = lhs.codes.shape
    N = rhs.codes.shape[1]
    k, _, n = block_shape
    problem = make_problem(size, (K, N, tiles * m), dtype, config, fallback=False)
    rhs_codes = pad_codes(rhs.codes, problem.N, m)
    operands = Operands(
        lhs=pad_codes(lhs.codes, problem.M, m),
        residual=None,
        rows=None,
        order=None,
        lhs_scales=_along_k(lhs.scales, k, problem.M, m),
        counts=None,
        regular_counts=None,
        rhs=rhs_codes,
        rhs_scales=_along_k(rhs.scales, n, problem.N, m),
        rhs_sums=_sums(problem, rhs, rhs_codes),
        step_ranges=m // BLOCK * tile_ranges(groups, size),
    )
    return multiply(problem, operands)[:, :K, :N]


def _sums(problem: Problem, rhs: Quantized, codes: jax.Array) -> jax.Array | None:
    return _largest(sums_of(rhs, codes)) if problem.running_sums else None


def _largest(sums: jax.Array | None) -> jax.Array | None:
    """The sums, with the largest of each ``SUM_CHUNK`` in place of many.

    Every thread block reads all of them, and experts have many.
    """
    if sums is None:
        return None
    padded = jnp.pad(sums, (0, -sums.size % SUM_CHUNK))
    return jnp.max(padded.reshape(-1, SUM_CHUNK), axis=0)


def _along_k(scales: jax.Array, side: int, rows: int, m: int) -> jax.Array:
    """Scales ``[T, R/side, 1]`` of tiles as ``[1, R/128, T * m/128]``."""
    scales = scale_per_tile(scales, (side, m), rows, m)
    return scales.transpose(1, 0, 2).reshape(1, rows // BLOCK, -1)
