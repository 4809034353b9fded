"""Block quantization, with fallback and transposition, in one pass over the operand.

One program quantizes one block; the device code is in ``block_quantize``.  A block
that is too large for the registers is quantized in parts.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import rounding
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.triton.block_codes import metric_of, scale_and_inverse
from fbq_jax.kernels.triton.block_quantize import (
    load_and_measure,
    quantize_parts,
    quantize_with_fallback,
    store_scale,
)
from fbq_jax.kernels.triton.block_tiles import load, locate_block
from fbq_jax.kernels.triton.launch import launch_on_blocks
from fbq_jax.kernels.triton.outputs import BlockOutputs, as_layouts


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
) -> Layouts:
    """See ``reference.quantize``."""
    out = BlockOutputs(x.shape, block)
    results = _launch(
        _quantize,
        x,
        seeds,
        *(global_offset or rounding.no_offset(x.shape[1])),
        block=block,
        outputs=[*out.rowwise(rowwise), *out.colwise(colwise)],
        many_registers="stochastic" in (rowwise, colwise) and x.dtype.itemsize == 4,
        ROWWISE=rowwise,
        COLWISE=colwise,
    )
    return as_layouts(x.shape, results[:2], results[2:])


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
) -> FallbackQuantized:
    """See ``reference.quantize_fallback``."""
    out = BlockOutputs(x.shape, block)
    results = _launch(
        _quantize_fallback,
        x,
        theta,
        seeds,
        *(global_offset or rounding.no_offset(x.shape[1])),
        block=block,
        outputs=[*out.rowwise(), *out.rowwise(), out.scales, *out.colwise(colwise)],
        many_registers=colwise == "stochastic",
        CRITERION=criterion,
        COLWISE=colwise,
    )
    main, residual = Quantized(*results[:2]), Quantized(*results[2:4])
    transposed = as_layouts(x.shape, results[:2], results[5:]).colwise
    return FallbackQuantized(main, residual, results[4], transposed)


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """See ``reference.block_metric``."""
    (metric,) = _launch(
        _block_metric,
        x,
        block=block,
        outputs=[BlockOutputs(x.shape, block).scales],
        many_registers=False,
        CRITERION=criterion,
    )
    return metric


def _launch(
    kernel: triton.JITFunction,
    x: jax.Array,
    *args: jax.Array,
    block: Block,
    outputs: Sequence[jax.ShapeDtypeStruct],
    many_registers: bool,
    **constants: Any,
) -> Sequence[jax.Array]:
    """Runs a kernel on every block of x.  If there are none, all outputs are empty."""
    if x.size == 0:
        return [jnp.zeros(output.shape, output.dtype) for output in outputs]
    parts, num_warps = _parts_and_warps(block, many_registers=many_registers)
    return launch_on_blocks(
        kernel,
        x,
        *args,
        block=block,
        outputs=outputs,
        num_warps=num_warps,
        PARTS=parts,
        **constants,
    )


def _parts_and_warps(block: Block, *, many_registers: bool) -> tuple[int, int]:
    """The number of parts of a block, and of warps of a program.

    Fewer warps share more work, such as the noise keys and reductions, but each thread
    then holds more elements.  A kernel that needs ``many_registers`` per element gets
    twice as many warps.
    """
    size = block[0] * block[1]
    if size > 2**14:
        return size // 2**13, 8
    return 1, max(1, size // (2**11 if many_registers else 2**12))


@triton.jit
def _quantize(
    x,
    seeds,
    row_offsets,
    column_offset,
    rows,
    columns,
    codes,
    scales,
    colwise_codes,
    colwise_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLWISE: tl.constexpr,
):
    noise = seeds, row_offsets, column_offset
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    at, offsets = locate_block(rows, columns * COLUMN_UNIT, r, c)
    held, amax = load_and_measure(x, at, shape)
    scaling = store_scale(amax, (scales, colwise_scales), offsets)
    outputs = codes, colwise_codes
    modes: tl.constexpr = (ROWWISE, COLWISE, None)
    quantize_parts(load, x, held, scaling, noise, outputs, at, shape, modes)


@triton.jit
def _quantize_fallback(
    x,
    theta,
    seeds,
    row_offsets,
    column_offset,
    rows,
    columns,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    CRITERION: tl.constexpr,
    COLWISE: tl.constexpr,
):
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    noise = seeds, row_offsets, column_offset
    rowwise = (codes, scales), (residual_codes, residual_scales)
    outputs = rowwise, metrics, (colwise_codes, colwise_scales)
    modes: tl.constexpr = ("nearest", COLWISE, CRITERION)
    at, offsets = locate_block(rows, columns * COLUMN_UNIT, r, c)
    held, amax = load_and_measure(x, at, shape)
    quantize_with_fallback(
        load, x, held, amax, theta, noise, outputs, at, offsets, shape, modes
    )


@triton.jit
def _block_metric(
    x,
    rows,
    columns,
    metrics,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    CRITERION: tl.constexpr,
):
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    at, offsets = locate_block(rows, columns * COLUMN_UNIT, r, c)
    held, amax = load_and_measure(x, at, shape)
    scale, inverse = scale_and_inverse(amax)
    scaling = amax, scale, inverse
    sums = 0.0, 0.0
    if CRITERION != "absmax":
        modes: tl.constexpr = (None, None, CRITERION)
        sums = quantize_parts(
            load, x, held, scaling, None, (None, None), at, shape, modes
        )
    tl.store(metrics + offsets[0], metric_of(scaling, sums, CRITERION))
