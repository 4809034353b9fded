"""The INT8 GEMM with block scales and fallback: ``reference.matmul`` on TPUs.

A program computes an output tile from a chunk of K, whose codes lie in its memory.  It
goes through the tile's rows, 128 at a time, and through the *steps* of those rows: a
step multiplies one K block of lhs, or of its residual, with one of rhs.  The steps are
listed in scalar memory, so a residual adds no branch, only a step.

The matrix units multiply INT8 to INT32.  At the same time, the vector units convert the
products before, scale them and add them up: three operations an element.  The sums of
``SUM_COLUMNS`` columns stay in registers during a group of ``GROUP`` steps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fbq_jax.kernels.quantized import Quantized, product_sides
from fbq_jax.kernels.tpu.steps import Steps, list_all, list_used
from fbq_jax.kernels.tpu.tiles import VMEM_LIMIT, aligned, compiler_params

ROWS = 128  # rows of lhs that share their steps
SUM_COLUMNS = 256
GROUP = 4
_MAX_ROWS, _MAX_COLUMNS = 1024, 2048  # of a tile
_VMEM_OF_TILES = VMEM_LIMIT - 8 * 2**20  # bytes; the compiler needs some, too


class Tiling(NamedTuple):
    """How the product is divided among programs.

    Attributes:
      rows: rows of an output tile.
      columns: columns of an output tile.
      blocks: K blocks in a chunk.
      chunks: chunks of K.
    """

    rows: int
    columns: int
    blocks: int
    chunks: int


def matmul(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies INT8 codes as ``reference.matmul`` does.

    The sides of blocks are multiples of 128.  If K is not a multiple of a block, codes
    are copied and padded with zeros.

    Args:
      lhs: the left operand ``[B, M, K]``.
      rhs: the right operand ``[B, N, K]``, or ``[G, N, K]`` with groups.
      groups: int32 ``[B]``, as in ``reference.matmul``, in any order.
      dtype: the dtype of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    m, k, n = product_sides(lhs, rhs)
    (batch, M, _), (size, N, _) = lhs.shape, rhs.shape
    codes = [_pad_axis(term.codes, 2, k) for term in (*lhs.terms, rhs.main)]
    out = jax.ShapeDtypeStruct((batch, M, N), stored_dtype(dtype))
    tiling = choose_tiling(out, codes[0].shape[2] // k, k, len(lhs.terms))
    row_scales = [_row_scales(term.scales, m, M, tiling) for term in lhs.terms]
    list_steps = list_all if lhs.residual is None else list_used
    # Columns first: matrices of lhs that share one of rhs read it once.
    grid = pl.cdiv(N, tiling.columns), batch, pl.cdiv(M, tiling.rows), tiling.chunks
    kernel = functools.partial(_compute_tile, k)
    program: Callable[..., jax.Array] = pl.pallas_call(
        kernel if groups is None else functools.partial(_without_groups, kernel),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0 if groups is None else 1,
            grid=grid,
            in_specs=_input_specs(tiling, k, len(lhs.terms)),
            out_specs=pl.BlockSpec(
                (None, tiling.rows, tiling.columns), lambda j, b, i, *_: (b, i, j)
            ),
            scratch_shapes=[pltpu.VMEM((tiling.rows, tiling.columns), jnp.float32)],
        ),
        compiler_params=compiler_params(
            "parallel", "parallel", "parallel", "arbitrary"
        ),
        name="fbq_matmul",
    )
    column_scales = _column_scales(rhs.scales, n, N, tiling)
    steps = list_steps(*row_scales, multiple=GROUP)
    operands = steps, codes[:-1], codes[-1], column_scales
    if groups is None:
        return program(*operands).astype(dtype)
    is_valid = ((groups >= 0) & (groups < size))[:, None, None, None]
    steps = steps._replace(counts=jnp.where(is_valid, steps.counts, 0))
    groups = jnp.clip(groups, 0, size - 1)
    return program(groups, steps, *operands[1:]).astype(dtype)


def _without_groups(kernel: Callable[..., None], _groups: Any, *refs: Any) -> None:
    """A kernel of which only the grid reads the list of groups."""
    kernel(*refs)


def stored_dtype(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The dtype that a kernel stores for an output: vector units have no float16."""
    return dtype if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32


def tile_sides(rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of an output tile."""
    return (
        min(_MAX_ROWS, ROWS * pl.cdiv(rows, ROWS)),
        min(_MAX_COLUMNS, SUM_COLUMNS * pl.cdiv(columns, SUM_COLUMNS)),
    )


def choose_tiling(out: jax.ShapeDtypeStruct, blocks: int, k: int, terms: int) -> Tiling:
    """The largest tiles that fit into memory, beside the copies for the next program.

    Args:
      out: the output, ``[B, M, N]``.
      blocks: K blocks of the operands.
      k: the depth of a block.
      terms: 2 if lhs has a residual, else 1.
    """
    _, M, N = out.shape
    rows, columns = tile_sides(M, N)
    of_output = rows * columns * (4 + 2 * out.dtype.itemsize)
    of_block = 2 * (k * (terms * rows + columns) + 4 * columns)
    chunks = pl.cdiv(blocks, max(1, (_VMEM_OF_TILES - of_output) // of_block))
    # Chunks of the same size leave no part of the last one empty.
    even = (n for n in range(chunks, 2 * chunks) if blocks % n == 0)
    chunks = next(even, chunks)
    return Tiling(rows, columns, pl.cdiv(blocks, chunks), chunks)


def _row_scales(scales: jax.Array, m: int, M: int, tiling: Tiling) -> jax.Array:
    """Scales of 128 rows ``[B, chunks, I, blocks]``, 0 beyond the operand."""
    scales = jnp.repeat(scales, m // ROWS, axis=1)[:, : pl.cdiv(M, ROWS)]
    scales = _pad_axis(scales, 1, tiling.rows // ROWS)
    return _in_chunks(scales, tiling).swapaxes(1, 2)


def _column_scales(scales: jax.Array, n: int, N: int, tiling: Tiling) -> jax.Array:
    """Scales of columns ``[B, chunks, blocks, N]``, 0 beyond the operand."""
    scales = jnp.repeat(scales, n, axis=1)[:, :N]
    return jnp.moveaxis(_in_chunks(scales, tiling), 1, 3)


def _in_chunks(scales: jax.Array, tiling: Tiling) -> jax.Array:
    """Splits ``[B, R, K/k]`` into ``[B, R, chunks, blocks]``."""
    scales = _pad_axis(scales, 2, tiling.blocks * tiling.chunks)
    return scales.reshape(*scales.shape[:2], tiling.chunks, tiling.blocks)


def _pad_axis(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _input_specs(tiling: Tiling, k: int, terms: int) -> tuple[Any, ...]:
    """What a program reads of its steps, lhs, rhs and the scales of rhs."""

    def matrix(b: jax.Array, groups: tuple[Any, ...]) -> Any:
        """The index of the matrix of rhs that matrix b of lhs multiplies."""
        return groups[0][b] if groups else b

    def of_list(length: int) -> Any:
        shape = None, None, tiling.rows // ROWS, length
        return pl.BlockSpec(
            shape, lambda _, b, i, c, *__: (b, c, i, 0), memory_space=pltpu.SMEM
        )

    length = Steps.length(terms * tiling.blocks, GROUP)
    depth = tiling.blocks * k
    lhs = pl.BlockSpec((None, tiling.rows, depth), lambda _, b, i, c, *__: (b, i, c))
    return (
        Steps(of_list(length), of_list(length), of_list(1)),
        [lhs] * terms,
        pl.BlockSpec(
            (None, tiling.columns, depth), lambda j, b, _, c, *g: (matrix(b, g), j, c)
        ),
        pl.BlockSpec(
            (None, None, tiling.blocks, tiling.columns),
            lambda j, b, _, c, *g: (matrix(b, g), c, 0, j),
        ),
    )


def _compute_tile(
    k: int,
    steps: Steps,
    terms: Sequence[Any],
    rhs: Any,
    rhs_scales: Any,
    out: Any,
    sums: Any,
) -> None:
    """The kernel: adds the products of a chunk of K to the sums of a tile.

    Codes beyond the operands are arbitrary.  Their scales are 0.

    Args:
      k: the depth of a K block.
      steps: references to the steps of the tile's rows.
      terms: references to the codes of lhs and, with fallback, of its residual.
      rhs: a reference to the codes of rhs.
      rhs_scales: a reference to the scales of rhs, ``[blocks, columns]``.
      out: a reference to the tile of the output.
      sums: float32, of the tile's shape, which stays from chunk to chunk.
    """
    chunk, last_chunk = pl.program_id(3), pl.num_programs(3) - 1

    def add_rows(row: jax.Array, _: None) -> None:
        rows = aligned(row, ROWS)

        @pl.when(chunk == 0)
        def _start() -> None:
            sums[rows] = jnp.zeros((ROWS, sums.shape[1]), jnp.float32)

        def add_group(group: jax.Array, _: None) -> None:
            places = [group * GROUP + n for n in range(GROUP)]
            codes = [steps.order[row, place] for place in places]
            scales = [steps.scales[row, place] for place in places]
            blocks = [aligned(code // 2, k) for code in codes]
            lhs = [terms[0][rows, block] for block in blocks]
            if len(terms) == 2:
                lhs = [
                    jnp.where(code % 2 == 1, terms[1][rows, block], main)
                    for code, block, main in zip(codes, blocks, lhs, strict=True)
                ]
            for start in range(0, sums.shape[1], SUM_COLUMNS):
                columns = pl.ds(start, SUM_COLUMNS)
                total = sums[rows, columns]
                for code, scale, block, left in zip(
                    codes, scales, blocks, lhs, strict=True
                ):
                    product = lax.dot_general(
                        left,
                        rhs[columns, block],
                        (((1,), (1,)), ((), ())),
                        preferred_element_type=jnp.int32,
                    )
                    scale *= rhs_scales[pl.ds(code // 2, 1), columns]
                    total += product.astype(jnp.float32) * scale
                sums[rows, columns] = total

        lax.fori_loop(0, steps.counts[row, 0] // GROUP, add_group, None)

        @pl.when(chunk == last_chunk)
        def _store() -> None:
            out[rows] = sums[rows].astype(out.dtype)

    lax.fori_loop(0, sums.shape[0] // ROWS, add_rows, None)
