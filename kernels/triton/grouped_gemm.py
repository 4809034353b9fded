"""The GEMMs of rows in groups, each group with its own matrix, in Triton."""

import jax
import jax.numpy as jnp

from fbq_jax.kernels.quantized import Quantized
from fbq_jax.kernels.tiles import tile_ranges
from fbq_jax.kernels.triton.gemm import launch_gemm
from fbq_jax.kernels.triton.gemm_config import Config


def matmul(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does with groups; blocks as in ``gemm``.

    Products of tiles without a group are not written.

    Args:
      lhs: tiles ``[T, m, K]`` of 32, 64, 128 or 256 rows.
      rhs: the matrices ``[G, N, K]``.
      groups: int32 ``[T]``, each tile's group.
      dtype: the dtype of the output.
      sm: as in ``gemm.matmul``.
      config: as in ``gemm.matmul``.

    Returns:
      ``[T, m, N]`` in ``dtype``.
    """
    (tiles, m, _), (size, N, _) = lhs.shape, rhs.shape
    is_valid = (groups >= 0) & (groups < size)
    y = launch_gemm(
        jax.tree.map(lambda x: x.reshape(1, -1, x.shape[2]), lhs),
        rhs,
        *(1, dtype, sm, config),
        groups=jnp.where(is_valid, groups, -1),
        grouped="rows",
        tile_rows=m,
    )
    return y.reshape(tiles, m, N)


def contract(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Contracts as ``reference.contract`` does; blocks as in ``gemm``.

    Args:
      lhs: tiles ``[T, K, m]``, of one term, whose blocks have all of ``m``.
      rhs: tiles ``[T, N, m]``, of one term, whose blocks have all of ``m``.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
      dtype: the dtype of the output.
      sm: as in ``gemm.matmul``.
      config: as in ``gemm.matmul``.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    ranges = tile_ranges(groups, size)
    return launch_gemm(lhs, rhs, size, dtype, sm, config, ranges, "contraction")
