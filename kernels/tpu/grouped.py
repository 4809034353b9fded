"""The contraction of rows in groups on TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fbq_jax.kernels.quantized import Quantized, product_sides
from fbq_jax.kernels.tpu.gemm import ROWS, SUM_COLUMNS, stored_dtype, tile_sides
from fbq_jax.kernels.tpu.tiles import aligned, compiler_params


def contract(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Contracts INT8 codes as ``reference.contract`` does.

    A program adds the product of one tile's rows to a part of its group's sum.  The
    sides of blocks are multiples of 128.

    Args:
      lhs: tiles ``[T, K, m]``, of one term.
      rhs: tiles ``[T, N, m]``, of one term.
      groups: int32 ``[T]``, each tile's group, in ascending order.
      size: G.
      dtype: the dtype of the output.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    k, _, n = product_sides(lhs, rhs)
    (count, K, m), N = lhs.shape, rhs.shape[1]
    rows, columns = tile_sides(K, N)
    row_scales = jnp.repeat(lhs.scales, k // ROWS, axis=1)[:, : pl.cdiv(K, ROWS)]
    missing = -row_scales.shape[1] % (rows // ROWS)
    row_scales = jnp.pad(row_scales, [(0, 0), (0, missing), (0, 0)])
    column_scales = jnp.repeat(rhs.scales, n, axis=1)[:, :N].mT
    is_used = (groups >= 0) & (groups < size)
    out = pl.pallas_call(
        _add_tile,
        out_shape=jax.ShapeDtypeStruct((size, K, N), stored_dtype(dtype)),
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
        name="fbq_contract",
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
