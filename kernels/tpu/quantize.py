"""Quantization with a scale per block on TPUs, from one read of a matrix.

A program takes a *stripe*: the rows of a block, and as many blocks as fit into memory.
It goes through the stripe for the blocks' maxima, then for codes in both layouts, and
with fallback once more for the codes of the residual.  In between, it computes the
scales of all blocks together: block by block, they would be a chain of operations, each
waiting for the one before.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.quantized import (
    CodeDtype,
    Criterion,
    Layout,
    Layouts,
    Quantized,
    Term,
)
from fbq_jax.kernels.reference import NO_AMAX_REDUCE, AmaxReduce, check_layouts
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.kernels.sources import Source
from fbq_jax.kernels.tpu import tiles
from fbq_jax.kernels.tpu.quantize_vectors import quantize_vectors
from fbq_jax.kernels.tpu.tiles import LANES

_MAX_BLOCKS = 128  # of a stripe
# Of a stripe.  In float32, with three arrays of codes, and all of them twice, since the
# next stripe is loaded meanwhile, they are 56 of the 64 MiB of VMEM_LIMIT.
_MAX_VALUES = 2**22


def quantize(
    source: Source,
    seeds: rounding.Seeds,
    theta: jax.Array | None = None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    criterion: Criterion | None = None,
    bound: float = 127.0,
    dtype: CodeDtype = "int8",
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """See ``reference.quantize``; sides of blocks are multiples of 128.

    XLA computes a norm, a gate or its gradient in one pass, with what it saves, and
    gathers the rows of groups.  The kernel that quantizes reads the result.

    Raises:
      ValueError: the codes are in FP8 or have sums; or blocks have single rows, another
        bound than 127, or maxima that other devices share.
    """
    check_layouts(rowwise, colwise, criterion, dtype)
    layouts = [layout for layout in (rowwise, colwise) if layout is not None]
    if dtype != "int8" or any(x.sums or (1 in x.block and x.is_split) for x in layouts):
        raise ValueError(
            "TPU kernels make INT8 codes without sums, with scales of blocks or of "
            f"vectors; got {dtype=}, {rowwise=}, {colwise=}"
        )
    x, saved = source.compute()
    if not all(layout.is_split for layout in layouts):
        found = quantize_vectors(
            x,
            seeds,
            global_offset,
            rowwise=rowwise,
            colwise=colwise,
            bound=bound,
            amax_reduce=amax_reduce,
        )
        return found._replace(saved=saved)
    if bound != 127.0 or amax_reduce is not NO_AMAX_REDUCE:
        raise ValueError(
            "TPU kernels scale blocks to 127, and reduce no maxima over devices; got "
            f"{bound=} and {amax_reduce=}"
        )
    if not layouts:
        return Layouts(None, None, saved=saved)
    r, c = layouts[0].block
    assert r is not None
    assert c is not None
    options = _Options(
        source.shape,
        (r, c),
        rowwise and rowwise.rounding,
        colwise and colwise.rounding,
        criterion,
    )
    factors = None
    if options.draws_noise:
        factors = tiles.noise_factors(options.shape, seeds, global_offset)
    out = _run(options, x, factors, theta)
    scales = out["scales"][..., 0]
    main = transposed = metric = None
    if rowwise is not None:
        residual = None
        if criterion is not None:
            residual = Term(out["residual"], out["residual_scales"][..., 0])
            metric = out["metric"][..., 0]
        main = Quantized(Term(out["codes"], scales), residual, rowwise.block)
    if colwise is not None:
        codes = Term(out["transposed"], scales.mT)
        transposed = Quantized(codes, None, colwise.block[::-1])
    return Layouts(main, transposed, metric, saved)


class _Options(NamedTuple):
    """What is static in a call.

    Attributes:
      shape: ``(B, R, C)`` of the matrices.
      block: rows and columns of a block.
      rowwise: the rounding of the rowwise codes, or None.
      colwise: the rounding of the colwise codes, or None.
      criterion: the criterion of fallback, or None.
    """

    shape: tuple[int, int, int]
    block: tuple[int, int]
    rowwise: rounding.Rounding | None
    colwise: rounding.Rounding | None
    criterion: Criterion | None

    @property
    def draws_noise(self) -> bool:
        """Whether a layout is rounded stochastically."""
        return "stochastic" in (self.rowwise, self.colwise)

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of blocks along rows and along columns."""
        (_, R, C), (r, c) = self.shape, self.block
        return pl.cdiv(R, r), pl.cdiv(C, c)

    @property
    def stripe(self) -> int:
        """The number of blocks in a stripe."""
        r, c = self.block
        return min(self.blocks[1], _MAX_BLOCKS, _MAX_VALUES // (r * c))


def _run(
    options: _Options,
    x: jax.Array,
    factors: rounding.NoiseFactors | None,
    theta: jax.Array | None,
) -> dict[str, jax.Array]:
    """Runs the kernel; values per block are ``[B, R/r, C/c, LANES]``, all lanes equal.

    Args:
      options: what is static.
      x: ``[B, R, C]``.
      factors: the factors of the noise, or None without noise.
      theta: float32 ``[B]``, what the metric of a block that falls back exceeds, or 0
        if it is unset.
    """
    (batch, R, C), (r, c) = options.shape, options.block
    rows, columns = options.blocks
    width = options.stripe * c
    codes = jax.ShapeDtypeStruct((batch, R, C), jnp.int8)
    transposed = jax.ShapeDtypeStruct((batch, C, R), jnp.int8)
    per_block = jax.ShapeDtypeStruct((batch, rows, columns, LANES), jnp.float32)
    tile = pl.BlockSpec((None, r, width), lambda b, i, j: (b, i, j))
    outputs = {"scales": (per_block, _block_spec(options))}
    if options.rowwise:
        outputs["codes"] = codes, tile
    if options.colwise:
        spec = pl.BlockSpec((None, width, r), lambda b, i, j: (b, j, i))
        outputs["transposed"] = transposed, spec
    if options.criterion:
        outputs["residual"] = codes, tile
        for name in ("metric", "residual_scales"):
            outputs[name] = outputs["scales"]
    inputs: dict[str, Any] = {"x": tiles.with_known_dtype(x)}
    specs: dict[str, Any] = {"x": tile}
    if factors is not None:
        inputs["factors"] = factors
        of_row, of_column = tiles.vector_specs(r, width)
        specs["factors"] = rounding.NoiseFactors(of_row, of_column, of_row)
    if options.criterion:
        assert theta is not None
        inputs["limits"] = jnp.where(theta >= 0.0, theta, 0.0)
        specs["limits"] = pl.BlockSpec(memory_space=pltpu.SMEM)
    vectors = pltpu.VMEM((options.stripe, LANES), jnp.float32)
    result: dict[str, jax.Array] = pl.pallas_call(
        functools.partial(_quantize_stripe, options),
        out_shape={name: shape for name, (shape, _) in outputs.items()},
        grid=(batch, rows, pl.cdiv(columns, options.stripe)),
        in_specs=[specs],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        scratch_shapes=[vectors] * 5,
        compiler_params=tiles.compiler_params("parallel", "parallel", "parallel"),
        name="fbq_quantize",
    )(inputs)
    return tiles.not_fused(result)


def _block_spec(options: _Options) -> pl.BlockSpec:
    shape = None, None, options.stripe, LANES
    return pl.BlockSpec(shape, lambda b, i, j: (b, i, j, 0))


def _quantize_stripe(
    options: _Options,
    inputs: Mapping[str, Any],
    out: Mapping[str, Any],
    per_block: Any,
    scales: Any,
    inverses: Any,
    errors: Any,
    totals: Any,
) -> None:
    """The kernel.

    Args:
      options: what is static.
      inputs: references to the stripe of x, the factors of its noise, and the limits.
      out: references to the outputs.
      per_block: ``[blocks, LANES]``, memory for maxima and then for the inverses of the
        residual's scales.
      scales: ``[blocks, LANES]``, memory for scales.
      inverses: ``[blocks, LANES]``, memory for the inverses of scales.
      errors: ``[blocks, LANES]``, memory for ``sum |x - scale * codes|``.
      totals: ``[blocks, LANES]``, memory for ``sum |x|``.
    """
    matrix, row, column = (pl.program_id(axis) for axis in range(3))
    stripe = _Stripe(options, inputs["x"], row, column * options.stripe)

    def find_largest(j: jax.Array, _: None) -> None:
        per_block[pl.ds(j, 1)] = _largest_of_lanes(stripe.values(j))

    stripe.for_each_block(find_largest)
    amax = _max_lanes(per_block)
    scales[...], inverses[...] = scale_and_inverse(amax)
    out["scales"][...] = scales[...]

    def store_codes(j: jax.Array, _: None) -> None:
        x, columns = stripe.values(j), stripe.columns(j)
        inverse = stripe.spread(inverses, j)
        codes = {}
        if "nearest" in (options.rowwise, options.colwise):
            codes["nearest"] = reference.round_to_codes(x, inverse, None)
        if options.draws_noise:
            noise = tiles.load_noise(inputs["factors"], columns)
            codes["stochastic"] = reference.round_to_codes(x, inverse, noise)
        if options.rowwise:
            out["codes"][:, columns] = tiles.to_int8(codes[options.rowwise])
        if options.colwise:
            out["transposed"][columns] = tiles.to_int8(codes[options.colwise].T)
        if options.criterion:
            rest = reference.residual_of(x, codes["nearest"], stripe.spread(scales, j))
            per_block[pl.ds(j, 1)] = _largest_of_lanes(rest)
            if options.criterion != "absmax":
                weight = reference.shrinkage(stripe.spread(scales, j))
                errors[pl.ds(j, 1)] = _sums_of_lanes(rest * weight)
                totals[pl.ds(j, 1)] = _sums_of_lanes(x * weight)

    stripe.for_each_block(store_codes)
    if not options.criterion:
        return
    error, total = (_sum_lanes(sums) for sums in (errors, totals))
    metric = reference.metric_of(
        options.criterion, scales[...], error, total, amax=amax
    )
    out["metric"][...] = metric
    falls_back = metric > inputs["limits"][matrix]
    largest = jnp.where(falls_back, _max_lanes(per_block), 0.0)
    out["residual_scales"][...], per_block[...] = scale_and_inverse(largest)

    def store_residual(j: jax.Array, _: None) -> None:
        x, columns = stripe.values(j), stripe.columns(j)
        codes = reference.round_to_codes(x, stripe.spread(inverses, j), None)
        rest = reference.residual_of(x, codes, stripe.spread(scales, j))
        inverse = stripe.spread(per_block, j)
        second = reference.round_to_codes(rest, inverse, None)
        out["residual"][:, columns] = tiles.to_int8(second)

    stripe.for_each_block(store_residual)


class _Stripe(NamedTuple):
    """The blocks of a stripe.

    Attributes:
      options: what is static.
      x: a reference to the stripe of x.
      block_row: int32, the index of its row of blocks.
      first_block: int32, the index of its first block in that row.
    """

    options: _Options
    x: Any
    block_row: jax.Array
    first_block: jax.Array

    def for_each_block(self, body: Callable[[jax.Array, None], None]) -> None:
        """Calls ``body(j, None)`` for each block."""
        lax.fori_loop(0, self.options.stripe, body, None)

    def columns(self, j: jax.Array) -> Any:
        """The columns of block ``j``, in the stripe."""
        return tiles.aligned(j, self.options.block[1])

    def values(self, j: jax.Array) -> jax.Array:
        """The values of block ``j`` in float32, 0 beyond the matrix."""
        r, c = self.options.block
        first = self.block_row * r, (self.first_block + j) * c
        return tiles.load(self.x, self.columns(j), first, self.options.shape[1:])

    def spread(self, per_block: Any, j: jax.Array) -> jax.Array:
        """The value of block ``j``, once for each of its columns: ``[1, c]``."""
        return jnp.tile(per_block[pl.ds(j, 1)], (1, self.options.block[1] // LANES))


def _largest_of_lanes(x: jax.Array) -> jax.Array:
    """``max |x|`` of a block ``[r, c]`` in each lane, ``[1, LANES]``."""
    parts = [find_amax(part, 0, keepdims=True) for part in _by_lanes(x)]
    return find_amax(jnp.concatenate(parts), 0, keepdims=True)


def _sums_of_lanes(x: jax.Array) -> jax.Array:
    """``sum |x|`` of a block ``[r, c]`` in each lane, ``[1, LANES]``."""
    return jnp.sum(sum(_by_lanes(jnp.abs(x))), axis=0, keepdims=True)


def _by_lanes(x: jax.Array) -> list[jax.Array]:
    return [x[:, n : n + LANES] for n in range(0, x.shape[1], LANES)]


def _max_lanes(per_block: Any) -> jax.Array:
    """The largest of all lanes, in all lanes."""
    largest = find_amax(per_block[...], 1, keepdims=True)
    return jnp.broadcast_to(largest, per_block.shape)


def _sum_lanes(per_block: Any) -> jax.Array:
    """The sum of all lanes, in all lanes."""
    total = jnp.sum(per_block[...], axis=1, keepdims=True)
    return jnp.broadcast_to(total, per_block.shape)
