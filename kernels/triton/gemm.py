"""The GEMM with block scales and fallback: ``reference.matmul`` in Triton."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import cdiv

from fbq_jax.kernels.quantized import Quantized, Term
from fbq_jax.kernels.triton.gemm_config import Config, choose_config
from fbq_jax.kernels.triton.gemm_kernel import Grouped, Problem, gemm_kernel
from fbq_jax.kernels.triton.gemm_schedule import list_steps
from fbq_jax.kernels.triton.launch import compute_capability, launch


def matmul(
    lhs: Quantized,
    rhs: Quantized,
    *,
    dtype: jax.typing.DTypeLike,
    sm: int | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does.

    Blocks have sides m, k and n of 32, 64, 128 or 256; m and n may also be 1.  On
    GPUs of compute capability 8.9 or above, codes may be float8_e4m3fn.

    Args:
      lhs: the left operand ``[B, M, K]``.
      rhs: the right operand ``[B, N, K]``.
      dtype: the dtype of the output.
      sm: compute capability of the GPU times ten; by default of this process's first
        device.
      config: tuning options; by default from ``choose_config``.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    return launch_gemm(lhs, rhs, lhs.shape[0], dtype, sm, config)


def launch_gemm(
    lhs: Quantized,
    rhs: Quantized,
    batch: int,
    dtype: jax.typing.DTypeLike,
    sm: int | None,
    config: Config | None,
    groups: jax.Array | None = None,
    grouped: Grouped | None = None,
    tile_rows: int | None = None,
) -> jax.Array:
    """Runs the kernel.

    Args:
      lhs: the left operand ``[?, M, K]``.
      rhs: the right operand ``[?, N, K]``.
      batch: B.
      dtype: the dtype of the output.
      sm: as in ``matmul``.
      config: as in ``matmul``.
      groups: the kernel's list of groups; None without groups.
      grouped: as in ``Problem``.
      tile_rows: as in ``Problem``.

    Returns:
      ``[B, M, N]``.
    """
    sm = sm or compute_capability()
    problem = Problem.of(lhs, rhs, sm)._replace(grouped=grouped, tile_rows=tile_rows)
    M, N, K, m, k, n, fallback, *_ = problem
    if config is None:
        matrices = lhs.shape[0] if grouped == "contraction" else 1
        sizes = M, N, matrices * lhs.shape[2]
        config = choose_config(sizes, (m, k, n), sm, fallback=fallback)
    if tile_rows and tile_rows < config.BM:  # A program has rows of one group.
        config = config._replace(BM=tile_rows, num_warps=4)
    codes, scales = pack(lhs.main, m)
    second, lists = (codes, scales), (scales,) * 3  # not read without a residual
    if lhs.residual is not None:
        second = pack(lhs.residual, m)
        lists = _steps_of_tiles(lhs.main, lhs.residual, cdiv(config.BM, m))
    (y,) = launch(
        gemm_kernel,
        codes,
        scales,
        *second,
        *lists,
        *pack(rhs.main, n),
        scales if groups is None else groups,
        cdiv(K, k),
        outputs=[jax.ShapeDtypeStruct((batch, M, N), dtype)],
        grid=(batch * cdiv(M, config.BM) * cdiv(N, config.BN),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        P=problem,
        C=config,
    )
    return y


def pack(term: Term, block_rows: int) -> tuple[jax.Array, jax.Array]:
    """The codes and scales of a term, as kernels take them.

    Rows of codes are aligned, and scales are as ``gemm_kernel.scale_offsets`` says.
    """
    scales = term.scales.mT if block_rows == 1 else term.scales
    return align_rows(term.codes), scales


def align_rows(x: jax.Array) -> jax.Array:
    """Pads rows to a multiple of 16, so that vector loads can read each row."""
    padding = -x.shape[2] % 16
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding))) if padding else x


def _steps_of_tiles(
    main: Term, residual: Term, row_blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The step lists for rows of tiles, each with ``row_blocks`` row blocks.

    A list for several row blocks has a residual step if any of them uses the residual.
    The kernel then loads the scale of each row block, which is 0 if its residual is not
    used.
    """
    scales, residual_scales = main.scales, residual.scales
    if row_blocks > 1:
        batch, rows, columns = residual_scales.shape
        is_used = (residual_scales != 0.0).astype(jnp.float32)
        is_used = jnp.pad(is_used, ((0, 0), (0, -rows % row_blocks), (0, 0)))
        is_used = is_used.reshape(batch, -1, row_blocks, columns)
        residual_scales = jnp.max(is_used, axis=2)
        scales = jnp.zeros_like(residual_scales)
    lists = list_steps(scales, residual_scales)
    return lists.order, lists.scales, lists.counts
