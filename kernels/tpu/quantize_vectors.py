"""Quantization with a scale per row and per column on TPUs.

A first kernel reads a matrix for the maxima of its rows and columns, and a second one
for the codes in both layouts.  XLA fuses neither well: its transposed codes cost more
time than the product saves.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.quantized import Layout, Layouts, Quantized, Term
from fbq_jax.kernels.reference import NO_AMAX_REDUCE, AmaxReduce
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.kernels.tpu import tiles
from fbq_jax.kernels.tpu.tiles import LANES

_ROWS, _COLUMNS = 256, 4096  # of a tile, at most


def quantize_vectors(
    x: jax.Array,
    seeds: rounding.Seeds,
    global_offset: rounding.GlobalOffset | None = None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    bound: float = 127.0,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """See ``reference.quantize``; for scales of whole rows, columns or matrices."""
    x = tiles.with_known_dtype(x)
    inputs: dict[str, Any] = {"x": x}
    of_rows, of_columns = _find_amax(x)
    scales, roundings = {}, {}
    if rowwise is not None:
        reduced = amax_reduce.rowwise(_shared(rowwise, of_rows))
        scales["rowwise"], inverse = scale_and_inverse(reduced, bound)
        inputs["row_inverse"] = inverse[:, :, None]
        roundings["rowwise"] = rowwise.rounding
    if colwise is not None:
        reduced = amax_reduce.colwise(_shared(colwise, of_columns))
        scales["colwise"], inverse = scale_and_inverse(reduced, bound)
        inputs["column_inverse"] = inverse[:, None, :]
        roundings["colwise"] = colwise.rounding
    if "stochastic" in roundings.values():
        inputs["factors"] = tiles.noise_factors(x.shape, seeds, global_offset)
    codes = _quantize(inputs, roundings)
    found = {
        name: Quantized(Term(codes[name], scales[name][:, :, None]), None, (1, None))
        for name in roundings
    }
    return Layouts(found.get("rowwise"), found.get("colwise"))


def _shared(layout: Layout, amax: jax.Array) -> jax.Array:
    """The maxima ``[B, N]`` of vectors, or of the matrix, repeated for each vector."""
    if layout.block != (None, None):
        return amax
    return jnp.broadcast_to(find_amax(amax, 1, keepdims=True), amax.shape)


def _tile(x: jax.Array) -> tuple[int, int]:
    _, R, C = x.shape
    return min(_ROWS, 32 * pl.cdiv(R, 32)), min(_COLUMNS, LANES * pl.cdiv(C, LANES))


def _find_amax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``max |x|`` of the rows ``[B, R]`` and of the columns ``[B, C]``."""
    batch, R, C = x.shape
    r, c = _tile(x)
    parts = pl.cdiv(C, c)
    of_rows, of_columns = pl.pallas_call(
        functools.partial(_find_amax_of_tile, (R, C)),
        out_shape=(
            jax.ShapeDtypeStruct((batch, parts, R, 1), jnp.float32),
            jax.ShapeDtypeStruct((batch, 1, C), jnp.float32),
        ),
        grid=(batch, parts, pl.cdiv(R, r)),
        in_specs=[pl.BlockSpec((None, r, c), lambda b, j, i: (b, i, j))],
        out_specs=(
            pl.BlockSpec((None, None, r, 1), lambda b, j, i: (b, j, i, 0)),
            pl.BlockSpec((None, 1, c), lambda b, j, _: (b, 0, j)),
        ),
        scratch_shapes=[pltpu.VMEM((r, LANES), jnp.float32)],
        compiler_params=tiles.compiler_params("parallel", "parallel", "arbitrary"),
        name="fbq_find_amax",
    )(x)
    return find_amax(of_rows, 1)[:, :, 0], of_columns[:, 0]


def _find_amax_of_tile(
    shape: tuple[int, int], x: Any, of_rows: Any, of_columns: Any, lanes: Any
) -> None:
    """The kernel.  ``lanes [r, LANES]`` is memory for the maxima of each lane."""
    j, i = pl.program_id(1), pl.program_id(2)
    first = i * x.shape[0], j * x.shape[1]

    @pl.when(i == 0)
    def _start() -> None:
        of_columns[...] = jnp.zeros_like(of_columns)

    lanes[...] = jnp.zeros_like(lanes)

    def find(n: jax.Array, _: None) -> None:
        columns = tiles.aligned(n, LANES)
        values = tiles.load(x, columns, (first[0], first[1] + n * LANES), shape)
        lanes[...] = _larger(lanes[...], values)
        largest = find_amax(values, 0, keepdims=True)
        of_columns[:, columns] = _larger(of_columns[:, columns], largest)

    slices: int | jax.Array = x.shape[1] // LANES
    if shape[1] % x.shape[1]:  # the last tile extends beyond the matrix
        slices = jnp.minimum(slices, pl.cdiv(shape[1] - first[1], LANES))
    lax.fori_loop(0, slices, find, None)
    of_rows[...] = find_amax(lanes[...], 1, keepdims=True)


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """``max(|a|, |b|)``, and NaN if one is."""
    bits = (lax.bitcast_convert_type(jnp.abs(x), jnp.int32) for x in (a, b))
    return lax.bitcast_convert_type(jnp.maximum(*bits), jnp.float32)


def _quantize(
    inputs: Mapping[str, Any], roundings: Mapping[str, rounding.Rounding]
) -> dict[str, jax.Array]:
    """Codes ``[B, R, C]`` rowwise and ``[B, C, R]`` colwise, as ``roundings`` asks.

    Args:
      inputs: ``x``; the inverses of the scales of rows ``[B, R, 1]`` and of columns
        ``[B, 1, C]``; with noise its factors.
      roundings: by the names of the layouts, ``rowwise`` and ``colwise``.
    """
    batch, R, C = inputs["x"].shape
    r, c = _tile(inputs["x"])
    of_tile = pl.BlockSpec((None, r, c), lambda b, i, j: (b, i, j))
    of_row, of_column = tiles.vector_specs(r, c)
    specs = {
        "x": of_tile,
        "row_inverse": of_row,
        "column_inverse": of_column,
        "factors": rounding.NoiseFactors(of_row, of_column, of_row),
    }
    transposed = pl.BlockSpec((None, c, r), lambda b, i, j: (b, j, i))
    outputs = {
        "rowwise": (jax.ShapeDtypeStruct((batch, R, C), jnp.int8), of_tile),
        "colwise": (jax.ShapeDtypeStruct((batch, C, R), jnp.int8), transposed),
    }
    result: dict[str, jax.Array] = pl.pallas_call(
        functools.partial(_quantize_tile, roundings),
        out_shape={name: outputs[name][0] for name in roundings},
        grid=(batch, pl.cdiv(R, r), pl.cdiv(C, c)),
        in_specs=[{name: specs[name] for name in inputs}],
        out_specs={name: outputs[name][1] for name in roundings},
        compiler_params=tiles.compiler_params("parallel", "parallel", "parallel"),
        name="fbq_quantize_vectors",
    )(dict(inputs))
    return tiles.not_fused(result)


def _quantize_tile(
    roundings: Mapping[str, rounding.Rounding],
    inputs: Mapping[str, Any],
    out: Mapping[str, Any],
) -> None:
    """The kernel, whose references are as in ``_quantize``."""
    x = inputs["x"]

    def quantize(n: jax.Array, _: None) -> None:
        columns = tiles.aligned(n, LANES)
        values = x[:, columns].astype(jnp.float32)
        noise: dict[str | None, jax.Array | None] = {"nearest": None}
        if "factors" in inputs:
            noise["stochastic"] = tiles.load_noise(inputs["factors"], columns)
        if mode := roundings.get("rowwise"):
            inverse = inputs["row_inverse"][...]
            codes = reference.round_to_codes(values, inverse, noise[mode])
            out["rowwise"][:, columns] = tiles.to_int8(codes)
        if mode := roundings.get("colwise"):
            inverse = inputs["column_inverse"][:, columns]
            codes = reference.round_to_codes(values, inverse, noise[mode])
            out["colwise"][columns] = tiles.to_int8(codes.T)

    lax.fori_loop(0, x.shape[1] // LANES, quantize, None)
