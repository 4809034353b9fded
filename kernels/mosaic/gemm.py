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
from fbq_jax.kernels.quantized import CodeDtype, Quantized, Term, product_sides
from fbq_jax.kernels.triton.abs_sums import max_abs_sum
from fbq_jax.kernels.triton.gemm_schedule import list_steps

# Each row of tiles reads the residual scales of all to find its place in their order.
_MOST_ORDERED_ROWS = 256


def matmul(
    lhs: Quantized,
    rhs: Quantized,
    *,
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
    ordered: bool = False,
) -> jax.Array:
    """Multiplies as ``reference.matmul`` does.

    The sides of blocks are multiples of 128.  Without a residual, single rows may have
    scales, of lhs or of both operands, and codes may be float8_e4m3fn.  If M, N or K is
    not a multiple of 128, codes are copied and padded with zeros.

    Args:
      lhs: the left operand ``[B, M, K]``.
      rhs: the right operand ``[B, N, K]``.
      dtype: the dtype of the output, with 2 or 4 bytes.
      config: tuning options; by default those in the table.
      ordered: whether no sum is of the integers of several K blocks.

    Returns:
      ``[B, M, N]`` in ``dtype``.

    Raises:
      ValueError: there are both a residual and scales of single rows.
    """
    (batch, M, K), N = lhs.shape, rhs.shape[1]
    problem = make_problem(lhs, rhs, batch, (M, N, K), dtype, config)
    problem = dataclasses.replace(problem, ordered=ordered)
    operands = make_operands(problem, lhs, rhs, longest_first=True)
    return build(problem)(operands)[:, :M, :N]


def make_problem(
    lhs: Quantized,
    rhs: Quantized,
    batch: int,
    sizes: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    config: Config | None,
) -> Problem:
    """The problem of ``(M, N, K)``, which it pads to multiples of ``BLOCK``."""
    m, _, n = product_sides(lhs, rhs)
    row_scales: RowScales = "both" if n == 1 else "lhs" if m == 1 else "none"
    fallback = lhs.residual is not None
    if fallback and row_scales != "none":
        raise ValueError(
            "matmul by mosaic takes a residual with scales per block of 128 or 256 "
            f"rows; got blocks of {lhs.block} in lhs and {rhs.block} in rhs"
        )
    if config is None:
        op = "mosaic.matmul.fallback" if fallback else "mosaic.matmul"
        config = Config(**(tuning_table.lookup(op, sizes) or {}))
    M, N, K = (_padded(size) for size in sizes)
    codes: CodeDtype = "int8" if lhs.codes.dtype == jnp.int8 else "float8_e4m3fn"
    problem = Problem(
        *(batch, M, N, K, fallback, jnp.dtype(dtype), config, _num_sms()),
        row_scales=row_scales,
        codes=codes,
    )
    return problem.in_parts() if jax.device_count() > 1 else problem


def _padded(size: int) -> int:
    return BLOCK * cdiv(size, BLOCK)


def _num_sms() -> int:
    return jax.devices()[0].core_count


def make_operands(
    problem: Problem, lhs: Quantized, rhs: Quantized, *, longest_first: bool = False
) -> Operands:
    """Pads codes and scales to full tiles, and lists the steps of each tile row.

    Args:
      problem: the GEMM.
      lhs: the left operand.
      rhs: the right operand.
      longest_first: whether the rows of tiles with most steps come first.  With very
        many rows of tiles that would cost more than it saves, so they do not.
    """
    m, k, n = product_sides(lhs, rhs)
    (M, N), K = (problem.M, problem.N), _padded(lhs.shape[2])
    lhs_scales = scales_of_tiles(lhs.main, (m, k), M, K, problem.row_scales != "none")
    rhs_scales = scales_of_tiles(rhs.main, (n, k), N, K, problem.row_scales == "both")
    rhs_codes = _pad(rhs.codes, N, K)
    residual = rows = order = counts = regular_counts = sums = None
    if lhs.residual is not None:
        residual = _pad(lhs.residual.codes, M, K)
        rows, order, lhs_scales, counts, regular_counts = list_steps(
            lhs_scales,
            scales_of_tiles(lhs.residual, (m, k), M, K, per_row=False),
            padding=PREFETCH_PAD,
            outlier_ratio=OUTLIER_RATIO,
            longest_first=longest_first and M // BLOCK <= _MOST_ORDERED_ROWS,
        )
    if problem.running_sums:
        sums = max_abs_sum(rhs_codes) if rhs.sums is None else rhs.sums
        sums = jnp.pad(sums.reshape(-1), (0, max(0, SUM_CHUNK - sums.size)))
    return Operands(
        _pad(lhs.codes, M, K),
        *(residual, rows, order, lhs_scales, counts, regular_counts),
        *(rhs_codes, rhs_scales, sums),
    )


def _pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Pads matrices ``[B, R, C]`` with zeros."""
    _, r, c = x.shape
    return jnp.pad(x, ((0, 0), (0, rows - r), (0, columns - c)))


def scales_of_tiles(
    term: Term, block: tuple[int, int], rows: int, columns: int, per_row: bool
) -> jax.Array:
    """The scale of each 128 x 128 tile of codes, ``[B, rows/128, columns/128]``.

    With ``per_row``, the scale of each row in each of the tiles,
    ``[B, columns/128, rows]``, 0 for padding.
    """
    r, c = block
    if per_row:
        scales = jnp.repeat(jnp.repeat(term.scales.mT, c // BLOCK, axis=1), r, axis=2)
        scales = scales[:, : columns // BLOCK, :rows]
        return _pad(scales, columns // BLOCK, rows)
    scales = jnp.repeat(term.scales, r // BLOCK, axis=1)
    scales = jnp.repeat(scales, c // BLOCK, axis=2)
    return scales[:, : rows // BLOCK, : columns // BLOCK]
