"""Quantization, with fallback and transposition, in one pass over the operand.

One program quantizes one block; ``tiles`` has what it does there.  A block too large
for the registers is quantized in parts, one below the other, that are loaded twice: for
the scale, which is of them all, and, from a cache, for the codes.
"""

import math
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
from fbq_jax.kernels.triton.block_tiles import (
    find_amax,
    in_scale,
    load,
    measure,
    metric_of,
    nearest,
    part_of,
    position,
    residual_of,
    scale_of,
    stochastic,
    store_columns,
    store_rounded,
    store_rows,
    sum_abs,
)
from fbq_jax.kernels.triton.launch import launch


def config(block: Block, *, wide: bool) -> tuple[int, int]:
    """The parts of a block and the warps of a program.

    Few warps share the most work: the keys of the noise, and reductions.  But a thread
    then holds more; ``wide`` is for kernels whose registers would not last.
    """
    size = block[0] * block[1]
    if size > 2**14:
        return size // 2**13, 8
    return 1, max(1, size // (2**11 if wide else 2**12))


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
    operand = _Operand(x, block)
    codes, scales, *by_columns = operand.launch(
        _quantize,
        seeds,
        *(global_offset or rounding.whole(operand.rows)),
        outputs=[
            *operand.by_rows(wanted=rowwise is not None),
            *operand.by_columns(wanted=colwise is not None),
        ],
        wide="stochastic" in (rowwise, colwise) and x.dtype.itemsize == 4,
        ROWS=rowwise,
        COLUMNS=colwise,
    )
    return Layouts(
        None if rowwise is None else Quantized(codes, scales),
        None if colwise is None else operand.columns(*by_columns),
    )


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
    operand = _Operand(x, block)
    codes, scales, residual, residual_scales, metric, *by_columns = operand.launch(
        _quantize_fallback,
        theta,
        seeds,
        *(global_offset or rounding.whole(operand.rows)),
        outputs=[
            *operand.by_rows(wanted=True),
            *operand.by_rows(wanted=True),
            operand.by_rows(wanted=True)[1],
            *operand.by_columns(wanted=colwise is not None),
        ],
        wide=colwise == "stochastic",
        CRITERION=criterion,
        COLUMNS=colwise,
    )
    return FallbackQuantized(
        Quantized(codes, scales),
        Quantized(residual, residual_scales),
        metric,
        None if colwise is None else operand.columns(*by_columns),
    )


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """See ``reference.block_metric``."""
    operand = _Operand(x, block)
    (metric,) = operand.launch(
        _block_metric,
        outputs=[operand.by_rows(wanted=True)[1]],
        wide=False,
        CRITERION=criterion,
    )
    return metric


class Matrices:
    """The shapes of codes and scales of matrices ``[B, R, C]``."""

    def __init__(self, shape: tuple[int, ...], block: Block) -> None:
        self.batch, self.rows, self.width = shape
        self.blocks = -(-self.rows // block[0]), -(-self.width // block[1])
        self.programs = self.batch * self.blocks[0] * self.blocks[1]

    def by_rows(self, *, wanted: bool) -> list[jax.ShapeDtypeStruct]:
        """Codes as the matrices lie, none unless wanted, and scales."""
        shape = (self.batch, self.rows, self.width) if wanted else (0,)
        return [
            jax.ShapeDtypeStruct(shape, jnp.int8),
            jax.ShapeDtypeStruct((self.batch, *self.blocks), jnp.float32),
        ]

    def by_columns(self, *, wanted: bool) -> list[jax.ShapeDtypeStruct]:
        """Transposed codes, none unless wanted, and scales.

        Each column of codes is padded to 16 bytes, what a thread stores at once.
        """
        shape = (self.batch, self.width, -(-self.rows // 16) * 16) if wanted else (0,)
        return [
            jax.ShapeDtypeStruct(shape, jnp.int8),
            jax.ShapeDtypeStruct((self.batch, *self.blocks[::-1]), jnp.float32),
        ]

    def columns(self, codes: jax.Array, scales: jax.Array) -> Quantized:
        """What ``by_columns`` describes, without its padding."""
        return Quantized(codes[..., : self.rows], scales)


class _Operand(Matrices):
    """An operand, and what a launch needs to know of it."""

    def __init__(self, x: jax.Array, block: Block) -> None:
        super().__init__(x.shape, block)
        self.x, self.block = x, block

    def launch(
        self,
        kernel: triton.JITFunction,
        *args: jax.Array,
        outputs: list[jax.ShapeDtypeStruct],
        wide: bool,
        **constants: Any,
    ) -> Sequence[jax.Array]:
        """Runs a kernel on every block; if there is none, the outputs are empty."""
        if self.programs == 0:
            return [jnp.zeros(output.shape, output.dtype) for output in outputs]
        unit = math.gcd(self.width, 16)
        parts, num_warps = config(self.block, wide=wide)
        return launch(
            kernel,
            self.x,
            *args,
            self.rows,
            self.width // unit,
            outputs=outputs,
            grid=(self.programs,),
            num_warps=num_warps,
            num_stages=1,
            r=self.block[0],
            c=self.block[1],
            PARTS=parts,
            COLUMN_UNIT=unit,
            **constants,
        )


@triton.jit
def _quantize(
    x,
    seeds,
    origin_rows,
    origin_column,
    rows,
    columns,
    codes,
    scales,
    column_codes,
    column_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    noise = seeds, origin_rows, origin_column
    columns *= COLUMN_UNIT
    batch, i, j, at, at_column = position(rows, columns, r, c)
    tiles, amax = measure(x, batch, i, j, rows, columns, r, c, PARTS)
    scale, inverse = scale_of(amax)
    tl.store(scales + at, scale)
    tl.store(column_scales + at_column, scale)
    for part in range(i * PARTS, (i + 1) * PARTS):
        v = in_scale(part_of(tiles, x, batch, part, j, rows, columns, PARTS), inverse)
        store_rounded(
            codes, column_codes, v, noise, batch, part, j, rows, columns, ROWS, COLUMNS
        )


@triton.jit
def _quantize_fallback(
    x,
    theta,
    seeds,
    origin_rows,
    origin_column,
    rows,
    columns,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metric,
    column_codes,
    column_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    CRITERION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    noise = seeds, origin_rows, origin_column
    columns *= COLUMN_UNIT
    batch, i, j, at, at_column = position(rows, columns, r, c)
    tiles, amax = measure(x, batch, i, j, rows, columns, r, c, PARTS)
    scale, inverse = scale_of(amax)
    tl.store(scales + at, scale)
    tl.store(column_scales + at_column, scale)
    lost, total = 0.0, 0.0
    for part in range(i * PARTS, (i + 1) * PARTS):
        x_part = part_of(tiles, x, batch, part, j, rows, columns, PARTS)
        v = in_scale(x_part, inverse)
        rounded = nearest(v)
        store_rows(codes, rounded, batch, part, j, rows, columns)
        if COLUMNS == "nearest":
            store_columns(column_codes, rounded, batch, part, j, rows, columns)
        if COLUMNS == "stochastic":
            noisy = stochastic(v, noise, batch, part, j, rows)
            store_columns(column_codes, noisy, batch, part, j, rows, columns)
        if CRITERION != "absmax":
            lost += sum_abs(residual_of(x_part, rounded, scale))
        if CRITERION == "l1_rel":
            total += sum_abs(x_part)
    value = metric_of(amax, scale, lost, total, CRITERION)
    tl.store(metric + at, value)
    residual_scale = 0.0
    # The second condition is false for an amax so large that scale * 127 overflows.
    if (value > tl.load(theta + batch)) & (scale * 127.0 < float("inf")):
        # Loaded again, from a cache: registers kept until here would cost every block.
        residual_amax = 0.0
        for part in range(i * PARTS, (i + 1) * PARTS):
            x_part = load(x, batch, part, j, rows, columns, r // PARTS, c)
            residual = residual_of(x_part, nearest(in_scale(x_part, inverse)), scale)
            residual_amax = tl.maximum(residual_amax, find_amax(residual))
        residual_scale, residual_inverse = scale_of(residual_amax)
        for part in range(i * PARTS, (i + 1) * PARTS):
            x_part = load(x, batch, part, j, rows, columns, r // PARTS, c)
            residual = residual_of(x_part, nearest(in_scale(x_part, inverse)), scale)
            rounded = nearest(in_scale(residual, residual_inverse))
            store_rows(residual_codes, rounded, batch, part, j, rows, columns)
    tl.store(residual_scales + at, residual_scale)


@triton.jit
def _block_metric(
    x,
    rows,
    columns,
    metric,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    CRITERION: tl.constexpr,
):
    columns *= COLUMN_UNIT
    batch, i, j, at, _ = position(rows, columns, r, c)
    tiles, amax = measure(x, batch, i, j, rows, columns, r, c, PARTS)
    scale, inverse = scale_of(amax)
    lost, total = 0.0, 0.0
    if CRITERION != "absmax":
        for part in range(i * PARTS, (i + 1) * PARTS):
            x_part = part_of(tiles, x, batch, part, j, rows, columns, PARTS)
            rounded = nearest(in_scale(x_part, inverse))
            lost += sum_abs(residual_of(x_part, rounded, scale))
            if CRITERION == "l1_rel":
                total += sum_abs(x_part)
    tl.store(metric + at, metric_of(amax, scale, lost, total, CRITERION))
