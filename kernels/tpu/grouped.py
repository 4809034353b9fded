"""Quantization and GEMMs of rows in groups, each group with its own matrix, on TPUs.

XLA copies rows to tiles, and a kernel quantizes them as a stack of matrices.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fbq_jax.kernels import grouped_reference
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import (
    FallbackOptions,
    FallbackQuantized,
    Layouts,
    Quantized,
    QuantizeOptions,
)
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.kernels.tpu import gemm, quantize
from fbq_jax.kernels.tpu.gemm import ROWS, SUM_COLUMNS
from fbq_jax.kernels.tpu.tiles import aligned, compiler_params

_MAX_ROWS, _MAX_COLUMNS = 1024, 2048  # of an output tile of a contraction


def ragged_quantize(
    x: GroupedRows, seeds: Seeds, **options: Unpack[QuantizeOptions]
) -> Layouts:
    """Quantizes as ``grouped_reference.ragged_quantize`` does."""
    return grouped_reference.ragged_quantize(x, seeds, ops=quantize, **options)


def ragged_quantize_fallback(
    x: GroupedRows,
    theta: jax.Array,
    seeds: Seeds,
    **options: Unpack[FallbackOptions],
) -> FallbackQuantized:
    """Quantizes as ``grouped_reference.ragged_quantize_fallback`` does."""
    return grouped_reference.ragged_quantize_fallback(
        x, theta, seeds, ops=quantize, **options
    )


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies as ``grouped_reference.ragged_matmul`` does, with its arguments."""
    return gemm.matmul(
        lhs, residual, rhs, block_shape=block_shape, dtype=dtype, matrices=groups
    )


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Contracts as ``grouped_reference.ragged_contraction`` does.

    A program adds the product of one tile's rows to a part of its group's sum.

    Args:
      lhs: codes int8 ``[T, K, m]``, scales float32 ``[T, ceil(K/k), 1]``.
      rhs: codes int8 ``[T, N, m]``, scales float32 ``[T, ceil(N/n), 1]``.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
      block_shape: ``(k, m, n)``, each a multiple of 128.
      dtype: dtype of the output.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    k, m, n = block_shape
    count, K, _ = lhs.codes.shape
    N = rhs.codes.shape[1]
    rows = min(_MAX_ROWS, ROWS * pl.cdiv(K, ROWS))
    columns = min(_MAX_COLUMNS, SUM_COLUMNS * pl.cdiv(N, SUM_COLUMNS))
    row_scales = jnp.repeat(lhs.scales, k // ROWS, axis=1)[:, : pl.cdiv(K, ROWS)]
    missing = -row_scales.shape[1] % (rows // ROWS)
    row_scales = jnp.pad(row_scales, [(0, 0), (0, missing), (0, 0)])
    column_scales = jnp.repeat(rhs.scales, n, axis=1)[:, :N].mT
    is_used = (groups >= 0) & (groups < size)
    stored = dtype if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    out = pl.pallas_call(
        _add_tile,
        out_shape=jax.ShapeDtypeStruct((size, K, N), stored),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(K, rows), pl.cdiv(N, columns), count),
            in_specs=[
                pl.BlockSpec(
                    (None, rows // ROWS, 1),
                    lambda i, _, t, *__: (t, i, 0),
                    memory_space=pltpu.SMEM,
                ),
                pl.BlockSpec((None, rows, m), lambda i, _, t, *__: (t, i, 0)),
                pl.BlockSpec((None, columns, m), lambda _, j, t, *__: (t, j, 0)),
                pl.BlockSpec((None, 1, columns), lambda _, j, t, *__: (t, 0, j)),
            ],
            out_specs=pl.BlockSpec(
                (None, rows, columns), lambda i, j, t, groups, _: (groups[t], i, j)
            ),
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        ),
        compiler_params=compiler_params("parallel", "parallel", "arbitrary"),
        name="fbq_ragged_contraction",
    )(
        jnp.clip(groups, 0, size - 1),
        is_used.astype(jnp.int32),
        row_scales,
        lhs.codes,
        rhs.codes,
        column_scales,
    )
    # No program writes the sum of a group without tiles.
    index = jnp.arange(size, dtype=groups.dtype)
    has_tiles = jnp.any(groups[None, :] == index[:, None], axis=1)
    return jnp.where(has_tiles[:, None, None], out, 0).astype(dtype)


def _add_tile(
    groups: Any,
    is_used: Any,
    row_scales: Any,
    lhs: Any,
    rhs: Any,
    column_scales: Any,
    out: Any,
    sums: Any,
) -> None:
    """The kernel.

    Args:
      groups: a reference to each tile's group.
      is_used: a reference to 1 for each tile that is in a group, else 0.
      row_scales: a reference to the scales of 128 rows of lhs.
      lhs: a reference to the tile's codes of lhs.
      rhs: a reference to the tile's codes of rhs.
      column_scales: a reference to the scales of the columns of rhs.
      out: a reference to a part of the group's sum.
      sums: float32, of the shape of ``out``, which stays from tile to tile.
    """
    tile, last = pl.program_id(2), pl.num_programs(2) - 1
    group = groups[tile]

    @pl.when((tile == 0) | (group != groups[jnp.maximum(tile - 1, 0)]))
    def _start() -> None:
        sums[...] = jnp.zeros_like(sums)

    def add_rows(row: jax.Array, _: None) -> None:
        rows = aligned(row, ROWS)
        left = lhs[rows]
        for start in range(0, sums.shape[1], SUM_COLUMNS):
            columns = pl.ds(start, SUM_COLUMNS)
            product = lax.dot_general(
                left,
                rhs[columns],
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.int32,
            )
            scale = row_scales[row, 0] * column_scales[:, columns]
            sums[rows, columns] += product.astype(jnp.float32) * scale

    @pl.when(is_used[tile] == 1)
    def _add() -> None:
        lax.fori_loop(0, sums.shape[0] // ROWS, add_rows, None)

    @pl.when((tile == last) | (group != groups[jnp.minimum(tile + 1, last)]))
    def _store() -> None:
        out[...] = sums[...].astype(out.dtype)
