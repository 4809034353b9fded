"""Quantization with a scale per block on TPUs, from one read of a matrix.

A program takes a *stripe*: the rows of a block, and as many blocks as fit into memory.
It goes through the stripe for the blocks' maxima, then for codes in both layouts, and
with fallback once more for the codes of the residual.  In between, it computes the
scales of all blocks together: that of one block would be a chain of operations, each
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
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.scales import find_amax, scale_and_inverse
from fbq_jax.kernels.tpu import tiles
from fbq_jax.kernels.tpu.tiles import LANES

_MAX_BLOCKS = 128  # of a stripe
# Of a stripe.  In float32, with three arrays of codes, and all of them twice, since the
# next stripe is loaded meanwhile, they are 56 of the 64 MiB of VMEM_LIMIT.
_MAX_VALUES = 2**22


class Plan(NamedTuple):
    """What is static in a call.

    Attributes:
      shape: ``(B, R, C)`` of the matrices.
      block: rows and columns of a block.
      rowwise: the rounding of the rowwise codes, or None.
      colwise: the rounding of the colwise codes, or None.
      criterion: as in ``reference.quantize_fallback``.
    """

    shape: tuple[int, int, int]
    block: Block
    rowwise: rounding.Rounding | None
    colwise: rounding.Rounding | None
    criterion: Criterion | None = None

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


def quantize(
    x: jax.Array,
    seeds: rounding.Seeds,
    *,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
    sums: tuple[str, ...] = (),
) -> Layouts:
    """Quantizes as ``reference.quantize`` does; block sides are multiples of 128.

    Args:
      x: ``[B, R, C]``.
      seeds: the seeds of stochastic rounding, of B matrices.
      block: rows and columns of a block.
      rowwise: the rounding of the rowwise codes, or None to omit this layout.
      colwise: the rounding of the colwise codes, or None to omit this layout.
      global_offset: the offset of this shard in the global matrix.
      sums: must be empty, as no GEMM on a TPU reads them.
    """
    assert not sums
    batch, R, C = x.shape
    plan = Plan((batch, R, C), block, rowwise, colwise)
    found = _run(plan, x, _noise_factors(plan, seeds, global_offset))
    return Layouts(_rowwise(plan, found), _colwise(plan, found))


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: rounding.Seeds,
    *,
    block: Block,
    criterion: Criterion | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
) -> FallbackQuantized:
    """Quantizes as ``reference.quantize_fallback`` does; sides are multiples of 128.

    Args:
      x: ``[B, R, C]``.
      theta: float32 ``[B]``.
      seeds: the seeds of stochastic colwise rounding, of B matrices.
      block: rows and columns of a block.
      criterion: ``"absmax"``, ``"l1"`` or ``"l1_rel"``; None for no fallback.
      colwise: the rounding of the colwise codes, or None to omit this layout.
      global_offset: the offset of this shard in the global matrix.
    """
    batch, R, C = x.shape
    plan = Plan((batch, R, C), block, "nearest", colwise, criterion)
    limits = jnp.where(theta >= 0.0, theta, 0.0)
    found = _run(plan, x, _noise_factors(plan, seeds, global_offset), limits)
    main = _rowwise(plan, found)
    assert main is not None
    if criterion is None:
        no_metric = jnp.zeros((x.shape[0], 0, 0), jnp.float32)
        return FallbackQuantized(main, None, no_metric, _colwise(plan, found))
    residual = Quantized(found["residual"], found["residual_scales"][..., 0])
    metric = found["metric"][..., 0]
    return FallbackQuantized(main, residual, metric, _colwise(plan, found))


def _noise_factors(
    plan: Plan,
    seeds: rounding.Seeds,
    global_offset: rounding.GlobalOffset | None,
) -> rounding.NoiseFactors | None:
    """The factors of the noise of each matrix; None without noise."""
    if not plan.draws_noise:
        return None
    return tiles.noise_factors(plan.shape, seeds, global_offset)


def _run(
    plan: Plan,
    x: jax.Array,
    factors: rounding.NoiseFactors | None,
    limits: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Runs the kernel; values per block are ``[B, R/r, C/c, LANES]``, all lanes equal.

    Args:
      plan: what is static.
      x: ``[B, R, C]``.
      factors: the factors of the noise, or None without noise.
      limits: float32 ``[B]``, what the metric of a block that falls back exceeds.
    """
    (batch, R, C), (r, c) = plan.shape, plan.block
    rows, columns = plan.blocks
    width = plan.stripe * c
    codes = jax.ShapeDtypeStruct((batch, R, C), jnp.int8)
    transposed = jax.ShapeDtypeStruct((batch, C, R), jnp.int8)
    per_block = jax.ShapeDtypeStruct((batch, rows, columns, LANES), jnp.float32)
    tile = pl.BlockSpec((None, r, width), lambda b, i, j: (b, i, j))
    outputs = {"scales": (per_block, _block_spec(plan))}
    if plan.rowwise:
        outputs["codes"] = codes, tile
    if plan.colwise:
        spec = pl.BlockSpec((None, width, r), lambda b, i, j: (b, j, i))
        outputs["transposed"] = transposed, spec
    if plan.criterion:
        outputs["residual"] = codes, tile
        for name in ("metric", "residual_scales"):
            outputs[name] = outputs["scales"]
    inputs: dict[str, Any] = {"x": tiles.with_known_dtype(x)}
    specs: dict[str, Any] = {"x": tile}
    if factors is not None:
        inputs["factors"] = factors
        of_row, of_column = tiles.vector_specs(r, width)
        specs["factors"] = rounding.NoiseFactors(of_row, of_column, of_row)
    if plan.criterion:
        inputs["limits"] = limits
        specs["limits"] = pl.BlockSpec(memory_space=pltpu.SMEM)
    vectors = pltpu.VMEM((plan.stripe, LANES), jnp.float32)
    result: dict[str, jax.Array] = pl.pallas_call(
        functools.partial(_quantize_stripe, plan),
        out_shape={name: shape for name, (shape, _) in outputs.items()},
        grid=(batch, rows, pl.cdiv(columns, plan.stripe)),
        in_specs=[specs],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        scratch_shapes=[vectors] * 5,
        compiler_params=tiles.compiler_params("parallel", "parallel", "parallel"),
        name="fbq_quantize",
    )(inputs)
    return tiles.not_fused(result)


def _block_spec(plan: Plan) -> pl.BlockSpec:
    shape = None, None, plan.stripe, LANES
    return pl.BlockSpec(shape, lambda b, i, j: (b, i, j, 0))


def _rowwise(plan: Plan, found: Mapping[str, jax.Array]) -> Quantized | None:
    return Quantized(found["codes"], found["scales"][..., 0]) if plan.rowwise else None


def _colwise(plan: Plan, found: Mapping[str, jax.Array]) -> Quantized | None:
    if not plan.colwise:
        return None
    return Quantized(found["transposed"], found["scales"][..., 0].mT)


def _quantize_stripe(
    plan: Plan,
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
      plan: what is static.
      inputs: references to the stripe of x, the factors of its noise, and the limits.
      out: references to the outputs.
      per_block: ``[blocks, LANES]``, memory for maxima and then for the inverses of the
        residual's scales.
      scales: the same for scales.
      inverses: the same for the inverses of scales.
      errors: the same for ``sum |x - scale * codes|``.
      totals: the same for ``sum |x|``.
    """
    matrix, row, column = (pl.program_id(axis) for axis in range(3))
    stripe = Stripe(plan, inputs["x"], row, column * plan.stripe)

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
        if "nearest" in (plan.rowwise, plan.colwise):
            codes["nearest"] = reference.round_to_codes(x, inverse, None)
        if plan.draws_noise:
            noise = tiles.load_noise(inputs["factors"], columns)
            codes["stochastic"] = reference.round_to_codes(x, inverse, noise)
        if plan.rowwise:
            out["codes"][:, columns] = tiles.to_int8(codes[plan.rowwise])
        if plan.colwise:
            out["transposed"][columns] = tiles.to_int8(codes[plan.colwise].T)
        if plan.criterion:
            rest = reference.residual_of(x, codes["nearest"], stripe.spread(scales, j))
            per_block[pl.ds(j, 1)] = _largest_of_lanes(rest)
            if plan.criterion != "absmax":
                weight = reference.shrinkage(stripe.spread(scales, j))
                errors[pl.ds(j, 1)] = _sums_of_lanes(rest * weight)
                totals[pl.ds(j, 1)] = _sums_of_lanes(x * weight)

    stripe.for_each_block(store_codes)
    if not plan.criterion:
        return
    error, total = (_sum_lanes(sums) for sums in (errors, totals))
    metric = reference.metric_of(plan.criterion, scales[...], error, total, amax=amax)
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


class Stripe(NamedTuple):
    """The blocks of a stripe.

    Attributes:
      plan: what is static.
      x: a reference to the stripe of x.
      block_row: int32, the index of its row of blocks.
      first_block: int32, the index of its first block in that row.
    """

    plan: Plan
    x: Any
    block_row: jax.Array
    first_block: jax.Array

    def for_each_block(self, body: Callable[[jax.Array, None], None]) -> None:
        """Calls ``body(j, None)`` for each block."""
        lax.fori_loop(0, self.plan.stripe, body, None)

    def columns(self, j: jax.Array) -> Any:
        """The columns of block ``j``, in the stripe."""
        return tiles.aligned(j, self.plan.block[1])

    def values(self, j: jax.Array) -> jax.Array:
        """The values of block ``j`` in float32, 0 beyond the matrix."""
        r, c = self.plan.block
        first = self.block_row * r, (self.first_block + j) * c
        return tiles.load(self.x, self.columns(j), first, self.plan.shape[1:])

    def spread(self, per_block: Any, j: jax.Array) -> jax.Array:
        """The value of block ``j``, once for each of its columns: ``[1, c]``."""
        return jnp.tile(per_block[pl.ds(j, 1)], (1, self.plan.block[1] // LANES))


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
