"""Vector-wise quantization: one scale per row (rowwise) or per column (colwise).

A scale depends on a whole row or column, so there are two passes over the operand.  The
first pass writes the maxima of each tile, which XLA reduces to scales.  The second pass
writes the codes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.quantized import Layout, Layouts
from fbq_jax.kernels.reference import NO_AMAX_REDUCE, AmaxReduce
from fbq_jax.kernels.rounding import GlobalOffset, MatrixSeeds, Seeds
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.kernels.triton.arguments import (
    column_unit,
    colwise_operand,
    colwise_outputs,
    launch_on_blocks,
    noise_inputs,
    output,
    rowwise_operand,
    rowwise_outputs,
)
from fbq_jax.kernels.triton.block_codes import multiply, nearest, stochastic, widen
from fbq_jax.kernels.triton.block_maxima import column_maxima as column_maxima_of
from fbq_jax.kernels.triton.block_maxima import row_maxima as row_maxima_of
from fbq_jax.kernels.triton.block_tiles import (
    load,
    locate_block,
    store_colwise,
    store_rowwise,
)

TILE = (64, 128)


def quantize_vectors(
    x: jax.Array,
    seeds: Seeds,
    global_offset: GlobalOffset | None = None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    bound: float = 127.0,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """See ``reference.quantize``; for scales of whole rows, columns or matrices."""
    batch, rows, columns = x.shape
    shape = batch, rows, columns
    down, across = triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1])
    inputs = {"x": x} | noise_inputs(seeds, global_offset, rows, rowwise, colwise)
    unit = column_unit(columns)
    run = functools.partial(
        launch_on_blocks,
        shape=shape,
        block=TILE,
        unit=unit,
        SHAPE=(*TILE, unit),
        ROWWISE=rowwise and rowwise.rounding,
        COLWISE=colwise and colwise.rounding,
    )
    outputs = {
        "row_maxima": output((batch, across, rows), jnp.float32, wanted=rowwise),
        "column_maxima": output((batch, down, columns), jnp.float32, wanted=colwise),
    }
    maxima = run(_find_maxima, inputs, outputs)
    scales = functools.partial(_scales, bound=bound)
    inverses = dict.fromkeys(("row_inverses", "column_inverses"))
    found = {}
    if rowwise is not None:
        found["scales"], inverses["row_inverses"] = scales(
            maxima["row_maxima"], rowwise, amax_reduce.rowwise
        )
    if colwise is not None:
        found["colwise_scales"], inverses["column_inverses"] = scales(
            maxima["column_maxima"], colwise, amax_reduce.colwise
        )
    found = found | run(
        _round_vectors,
        inputs | inverses,
        rowwise_outputs(shape, rowwise) | colwise_outputs(shape, colwise),
        FOLDS_SEEDS=isinstance(seeds, MatrixSeeds),
        CLIPPED=bound > 127.0,
    )
    return Layouts(
        rowwise_operand(found, shape, rowwise), colwise_operand(found, shape, colwise)
    )


@functools.partial(jax.jit, static_argnames=("layout", "amax_reduce", "bound"))
def _scales(
    maxima: jax.Array,
    layout: Layout,
    amax_reduce: Callable[[jax.Array], jax.Array],
    *,
    bound: float,
) -> tuple[jax.Array, jax.Array]:
    """Scales ``[B, N, 1]`` and inverses ``[B, N]`` from the maxima of ``_find_maxima``.

    The maxima are ``[B, T, N]``, where T counts tiles.
    """
    amax = find_amax(maxima, 1)
    if layout.block == (None, None):
        amax = jnp.broadcast_to(find_amax(amax, 1, keepdims=True), amax.shape)
    scales, inverses = scale_and_inverse(amax_reduce(amax), bound)
    return scales[:, :, None], inverses


@triton.jit
def _find_maxima(
    x,
    rows,
    units,
    row_maxima,
    column_maxima,
    SHAPE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
):
    """``max |x|`` of each row and each column of a tile."""
    r: tl.constexpr = SHAPE[0]
    c: tl.constexpr = SHAPE[1]
    at, _ = locate_block(rows, units * SHAPE[2], r, c)
    batch, i, j, _, columns = at
    tiles = load((x,), at, r, c)
    if ROWWISE is not None:
        row_maxima += (batch * tl.cdiv(columns, c) + j) * rows
        row = i * r + tl.arange(0, r)
        tl.store(row_maxima + row, row_maxima_of(tiles), row < rows)
    if COLWISE is not None:
        column_maxima += (batch * tl.cdiv(rows, r) + i) * columns
        column = j * c + tl.arange(0, c)
        tl.store(column_maxima + column, column_maxima_of(tiles), column < columns)


@triton.jit
def _round_vectors(
    x,
    row_inverses,
    column_inverses,
    seeds,
    calls,
    places,
    global_offset,
    rows,
    units,
    codes,
    colwise_codes,
    SHAPE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
    FOLDS_SEEDS: tl.constexpr,
    CLIPPED: tl.constexpr,
):
    """Stores the codes of a tile."""
    noise = (seeds, calls, places) if FOLDS_SEEDS else (seeds,), global_offset
    at, _ = locate_block(rows, units * SHAPE[2], SHAPE[0], SHAPE[1])
    tiles = load((x,), at, SHAPE[0], SHAPE[1])
    if ROWWISE is not None:
        v = _multiply_rows(tiles, row_inverses, at)
        store_rowwise(codes, _round(v, noise, at, ROWWISE, CLIPPED), at)
    if COLWISE is not None:
        v = _multiply_columns(tiles, column_inverses, at)
        store_colwise(colwise_codes, _round(v, noise, at, COLWISE, CLIPPED), at)


@triton.jit
def _multiply_rows(tiles, inverses, at):
    """Tiles in units of the scales of their rows."""
    batch, i, _, rows, _ = at
    r: tl.constexpr = 4 * tiles[0].shape[0]
    inverses += batch * rows
    v = ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4)[:, None] + k
        inverse = tl.load(inverses + row, row < rows, 0.0)
        v += (widen(tiles[k]) * inverse,)
    return v


@triton.jit
def _multiply_columns(tiles, inverses, at):
    """Tiles in units of the scales of their columns."""
    batch, _, j, _, columns = at
    c: tl.constexpr = tiles[0].shape[1]
    inverses += batch * columns
    column = j * c + tl.arange(0, c)[None, :]
    return multiply(tiles, tl.load(inverses + column, column < columns, 0.0))


@triton.jit
def _round(v, noise, at, MODE: tl.constexpr, CLIPPED: tl.constexpr):
    if CLIPPED:
        v = [tl.maximum(tl.minimum(x, 127.0), -127.0) for x in v]
    return nearest(v) if MODE == "nearest" else stochastic(v, noise, at)
