"""The INT8 GEMMs of rows in groups, each group with its own matrix, in Triton."""

import jax
import jax.numpy as jnp

from fbq_jax.kernels.grouped_reference import tile_ranges
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.triton.gemm import launch_gemm
from fbq_jax.kernels.triton.gemm_config import Config, choose_config
from fbq_jax.kernels.triton.launch import compute_capability


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``grouped_reference.ragged_matmul`` does.

    Products of tiles without a group are not written.

    Args:
      lhs: codes int8 ``[T, m, K]``, scales float32 ``[T, 1, ceil(K/k)]``.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes int8 ``[G, N, K]``, scales float32 ``[G, ceil(N/n), ceil(K/k)]``.
      groups: int32 ``[T]``, each tile's group.
      block_shape: ``(m, k, n)``, each 32, 64, 128 or 256.
      dtype: dtype of the output.
      sm: as in ``gemm.matmul``.
      config: tuning options; by default from ``choose_config``.

    Returns:
      ``[T, m, N]`` in ``dtype``.
    """
    sm = sm or compute_capability()
    tiles, m, K = lhs.codes.shape
    size, N, _ = rhs.codes.shape
    fallback, sizes = residual is not None, (tiles * m, N, K)
    config = config or choose_config(sizes, block_shape, sm, fallback=fallback)
    if m < config.BM:  # A tile has rows of one group.
        config = config._replace(BM=m, num_warps=4)
    lhs, residual = jax.tree.map(
        lambda x: x.reshape(1, -1, x.shape[2]), (lhs, residual)
    )
    y = launch_gemm(
        lhs,
        residual,
        rhs,
        jax.ShapeDtypeStruct((1, tiles * m, N), dtype),
        block_shape,
        sm,
        config,
        jnp.where((groups >= 0) & (groups < size), groups, -1),
        "rows",
    )
    return y.reshape(tiles, m, N)


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Contracts as ``grouped_reference.ragged_contraction`` does.

    Args:
      lhs: codes int8 ``[T, K, m]``, scales float32 ``[T, ceil(K/k), 1]``.
      rhs: codes int8 ``[T, N, m]``, scales float32 ``[T, ceil(N/n), 1]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
      block_shape: ``(k, m, n)``, each 32, 64, 128 or 256.
      dtype: dtype of the output.
      sm: as in ``gemm.matmul``.
      config: tuning options; by default from ``choose_config``.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    sm = sm or compute_capability()
    tiles, K, m = lhs.codes.shape
    N = rhs.codes.shape[1]
    sizes = K, N, tiles * m
    config = config or choose_config(sizes, block_shape, sm, fallback=False)
    out = jax.ShapeDtypeStruct((size, K, N), dtype)
    return launch_gemm(
        lhs,
        None,
        rhs,
        out,
        block_shape,
        sm,
        config,
        tile_ranges(groups, size),
        "contraction",
    )
