"""The GEMM with block scales and fallback: ``reference.matmul`` in Triton."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import cdiv

from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.triton.gemm_config import Config, choose_config
from fbq_jax.kernels.triton.gemm_kernel import gemm_kernel
from fbq_jax.kernels.triton.gemm_schedule import list_steps
from fbq_jax.kernels.triton.launch import compute_capability, launch


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
    """Multiplies as ``reference.matmul`` does.

    Args:
      lhs: codes int8 ``[B, M, K]``, scales float32 ``[B, ceil(M/m), ceil(K/k)]``.  On
        GPUs of compute capability 8.9 or above, codes may also be float8_e4m3fn.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes ``[B, N, K]`` of lhs's dtype, scales float32
        ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``, each 32, 64, 128 or 256; m and n may also be 1.
      dtype: dtype of the output.
      sm: compute capability of the GPU times ten; by default that of the first device
        of this process.
      config: tuning options; by default from ``choose_config``.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    sm = sm or compute_capability()
    batch, M, K = lhs.codes.shape
    sizes = M, rhs.codes.shape[1], K
    fallback = residual is not None
    config = config or choose_config(sizes, block_shape, sm, fallback=fallback)
    out = jax.ShapeDtypeStruct((batch, M, sizes[1]), dtype)
    return launch_gemm(lhs, residual, rhs, out, block_shape, sm, config)


def launch_gemm(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    out: jax.ShapeDtypeStruct,
    block_shape: tuple[int, int, int],
    sm: int,
    config: Config,
    groups: jax.Array | None = None,
    grouped: str | None = None,
) -> jax.Array:
    """Runs the kernel.

    Args:
      lhs: as in ``matmul``.
      residual: as in ``matmul``.
      rhs: as in ``matmul``.
      out: shape and dtype of the output, ``[B, M, N]``.
      block_shape: as in ``matmul``.
      sm: as in ``matmul``.
      config: tuning options.
      groups: the kernel's list of groups, or None.
      grouped: ``"rows"`` or ``"contraction"``, what the groups are of; None without.
    """
    m, k, n = block_shape
    batch, M, N = out.shape
    K = lhs.codes.shape[2]
    lhs, rhs = align(lhs), align(rhs)
    if residual is None:
        # Placeholders that the kernel does not read.
        second, lists = lhs, (lhs.scales, lhs.scales, lhs.scales)
    else:
        second = align(residual)
        lists = _steps_of_tiles(lhs, residual, cdiv(config.BM, m))
    lhs, second, rhs = (
        row_scales_last(*pair) for pair in ((lhs, m), (second, m), (rhs, n))
    )
    (y,) = launch(
        gemm_kernel,
        *lhs[:2],
        *second[:2],
        *lists,
        *rhs[:2],
        lhs.scales if groups is None else groups,
        cdiv(K, k),
        outputs=[out],
        grid=(batch * cdiv(M, config.BM) * cdiv(N, config.BN),),
        M=M,
        N=N,
        K=lhs.codes.shape[2],
        m=m,
        k=k,
        n=n,
        **config._asdict(),
        GROUPED=grouped,
        FALLBACK=residual is not None,
        # Before Ada, the conversion of an integer to a float is slow.
        MAGIC_CONVERSION=sm < 89,
    )
    return y


def align(operand: Quantized) -> Quantized:
    """Pads K to a multiple of 16 (``align_rows``)."""
    return operand._replace(codes=align_rows(operand.codes))


def align_rows(x: jax.Array) -> jax.Array:
    """Pads rows to a multiple of 16, so that vector loads can read each row."""
    padding = -x.shape[2] % 16
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding))) if padding else x


def row_scales_last(operand: Quantized, block_rows: int) -> Quantized:
    """Transposes the scales of single rows, as ``gemm_kernel.scale_offsets`` says."""
    if block_rows > 1:
        return operand
    return operand._replace(scales=operand.scales.mT)


def _steps_of_tiles(
    lhs: Quantized, residual: Quantized, row_blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The step lists for rows of tiles, each with ``row_blocks`` row blocks.

    A list for several row blocks has a residual step if any of them uses the residual.
    The kernel then loads the scale of each row block, which is 0 if its residual is not
    used.
    """
    scales, residual_scales = lhs.scales, residual.scales
    if row_blocks > 1:
        batch, rows, columns = residual_scales.shape
        is_used = (residual_scales != 0.0).astype(jnp.float32)
        is_used = jnp.pad(is_used, ((0, 0), (0, -rows % row_blocks), (0, 0)))
        is_used = is_used.reshape(batch, -1, row_blocks, columns)
        residual_scales = jnp.max(is_used, axis=2)
        scales = jnp.zeros_like(residual_scales)
    lists = list_steps(scales, residual_scales)
    return lists.order, lists.scales, lists.counts
