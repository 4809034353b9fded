"""The GEMM with block scales and fallback: ``reference.matmul`` on Hopper."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import cdiv

from fbq_jax.kernels import tuning_table
from fbq_jax.kernels.mosaic.gemm_kernel import build
from fbq_jax.kernels.mosaic.gemm_problem import (
    BLOCK,
    PREFETCH_PAD,
    SUM_CHUNK,
    Config,
    Operands,
    Problem,
    RowScales,
)
from fbq_jax.kernels.mosaic.gemm_promotion import OUTLIER_RATIO
from fbq_jax.kernels.mosaic.lower_once import call_lowered_once
from fbq_jax.kernels.reference import CodeDtype, Quantized
from fbq_jax.kernels.triton.abs_sums import max_abs_sum
from fbq_jax.kernels.triton.gemm_schedule import list_steps

# Each row of tiles reads the residual scales of all to find its place in their order.
_MOST_ORDERED_ROWS = 256


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does; block sizes are multiples of 128.

    Single rows may have scales, too, of lhs or of both operands, without a residual.
    If M, N or K is not a multiple of 128, codes are copied and padded with zeros.

    Args:
      lhs: codes int8 or, without a residual, float8_e4m3fn ``[B, M, K]``, scales
        float32 ``[B, ceil(M/m), ceil(K/k)]``.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes ``[B, N, K]`` of lhs's dtype, scales float32
        ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``, each a multiple of 128; m and n may also be 1.
      dtype: dtype of the output, with 2 or 4 bytes.
      config: tuning options; by default those in the table.

    Returns:
      ``[B, M, N]`` in ``dtype``.

    Raises:
      ValueError: if there are both a residual and scales of single rows.
    """
    m, _, n = block_shape
    row_scales: RowScales = "both" if n == 1 else "lhs" if m == 1 else "none"
    fallback = residual is not None
    if fallback and row_scales != "none":
        raise ValueError(
            "matmul by mosaic takes a residual with scales per block of 128 or 256 "
            f"rows; got block_shape={block_shape}"
        )
    batch, M, K = lhs.codes.shape
    sizes = M, rhs.codes.shape[1], K
    problem = make_problem(batch, sizes, dtype, config, fallback=fallback)
    codes: CodeDtype = "int8" if lhs.codes.dtype == jnp.int8 else "float8_e4m3fn"
    problem = dataclasses.replace(problem, row_scales=row_scales, codes=codes)
    operands = make_operands(
        problem, lhs, residual, rhs, block_shape, longest_first=True
    )
    return multiply(problem, operands)[:, :M, : sizes[1]]


def multiply(problem: Problem, operands: Operands) -> jax.Array:
    """Runs the kernel of a problem; returns its padded output."""
    shape = problem.batch, problem.M, problem.N
    out = jax.ShapeDtypeStruct(shape, problem.dtype)
    kernel, in_parts = build(problem), build(problem.in_parts())
    return call_lowered_once(kernel, operands, out, on_several_devices=in_parts)


def make_problem(
    batch: int,
    sizes: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    config: Config | None,
    *,
    fallback: bool,
) -> Problem:
    """The problem of ``(M, N, K)``, which it pads to multiples of ``BLOCK``."""
    config = config or _tuned_config(sizes, fallback=fallback)
    M, N, K = (BLOCK * cdiv(size, BLOCK) for size in sizes)
    return Problem(batch, M, N, K, fallback, jnp.dtype(dtype), config, _num_sms())


def _tuned_config(sizes: tuple[int, int, int], *, fallback: bool) -> Config:
    """The configuration for ``(M, N, K)`` in the table, or the default."""
    op = "mosaic.matmul.fallback" if fallback else "mosaic.matmul"
    return Config(**(tuning_table.lookup(op, sizes) or {}))


def _num_sms() -> int:
    return jax.devices()[0].core_count


def make_operands(
    problem: Problem,
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    block_shape: tuple[int, int, int],
    *,
    longest_first: bool = False,
) -> Operands:
    """Pads codes and scales to full tiles, and lists the steps of each tile row.

    Args:
      problem: the GEMM.
      lhs: as in ``matmul``.
      residual: as in ``matmul``.
      rhs: as in ``matmul``.
      block_shape: as in ``matmul``.
      longest_first: whether the rows of tiles with most steps come first.  With very
        many rows of tiles that would cost more than it saves, so they do not.
    """
    (m, k, n), (M, N, K) = block_shape, (problem.M, problem.N, problem.K)
    lhs_codes, rhs_codes = pad_codes(lhs.codes, M, K), pad_codes(rhs.codes, N, K)
    if problem.row_scales == "none":
        lhs_scales = scale_per_tile(lhs.scales, (m, k), M, K)
    else:
        lhs_scales = scale_per_row(lhs.scales, (m, k), M, K)
    if problem.row_scales == "both":
        rhs_scales = scale_per_row(rhs.scales, (n, k), N, K)
    else:
        rhs_scales = scale_per_tile(rhs.scales, (n, k), N, K)
    residual_codes = rows = order = counts = regular_counts = None
    if residual is not None:
        residual_codes = pad_codes(residual.codes, M, K)
        rows, order, lhs_scales, counts, regular_counts = list_steps(
            lhs_scales,
            scale_per_tile(residual.scales, (m, k), M, K),
            padding=PREFETCH_PAD,
            outlier_ratio=OUTLIER_RATIO,
            longest_first=longest_first and M // BLOCK <= _MOST_ORDERED_ROWS,
        )
    return Operands(
        lhs_codes,
        residual_codes,
        rows,
        order,
        lhs_scales,
        counts,
        regular_counts,
        rhs_codes,
        rhs_scales,
        sums_of(rhs, rhs_codes) if problem.running_sums else None,
    )


def sums_of(rhs: Quantized, codes: jax.Array) -> jax.Array:
    """The sums of rhs, or of its padded codes, as ``Operands`` has them."""
    sums = max_abs_sum(codes) if rhs.sums is None else rhs.sums
    return jnp.pad(sums.reshape(-1), (0, max(0, SUM_CHUNK - sums.size)))


def pad_codes(codes: jax.Array, rows: int, columns: int) -> jax.Array:
    """Pads matrices ``[B, R, C]`` with zeros."""
    _, r, c = codes.shape
    return jnp.pad(codes, ((0, 0), (0, rows - r), (0, columns - c)))


def scale_per_tile(
    scales: jax.Array, block: tuple[int, int], rows: int, columns: int
) -> jax.Array:
    """Repeats the scale of each block for each 128 x 128 tile of codes in it."""
    r, c = block
    scales = jnp.repeat(jnp.repeat(scales, r // BLOCK, axis=1), c // BLOCK, axis=2)
    return scales[:, : rows // BLOCK, : columns // BLOCK]


def scale_per_row(
    scales: jax.Array, block: tuple[int, int], rows: int, columns: int
) -> jax.Array:
    """The scales of each row of codes, ``[B, columns/128, rows]``; 0 for padding."""
    r, c = block
    scales = jnp.repeat(jnp.repeat(scales.mT, c // BLOCK, axis=1), r, axis=2)
    scales = scales[:, : columns // BLOCK, :rows]
    return jnp.pad(scales, ((0, 0), (0, 0), (0, rows - scales.shape[2])))
