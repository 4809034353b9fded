"""Norms and gates with the quantization of their output, in one pass.

One program makes and quantizes one block, in parts one below the other, because more
than the block lives in registers: what it is made of, in float32, and what is saved.  A
part is made once for the scale, which is of them all, and for what is saved, and once
more for the codes, of operands that a cache then has.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import fused_reference, packing
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized, Operand
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Block, Criterion, Layouts, Quantized
from fbq_jax.kernels.rounding import GlobalOffset, Rounding, whole
from fbq_jax.kernels.triton import quantize
from fbq_jax.kernels.triton.block_tiles import (
    find_amax,
    in_scale,
    load,
    metric_of,
    nearest,
    position,
    residual_of,
    scale_of,
    stochastic,
    store_columns,
    store_rounded,
    store_rows,
    sum_abs,
    widen,
)
from fbq_jax.kernels.triton.launch import launch
from fbq_jax.kernels.triton.packed import load_packed, store_packed

# Rows of a part, and warps: the fastest on an H200.
CONFIGS = {"norm": (32, 4), "gate": (16, 4), "grad": (32, 4)}
_WIDTHS = (8, 4, 2, 1)
LOG2_E = tl.constexpr(math.log2(math.e))


def fuses(block: Block, width: int) -> bool:
    """Whether each row of a block is a group of the packed codes of rows that long."""
    return block[1] == packing.GROUP and width % packing.GROUP == 0


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
) -> NormQuantized:
    """See ``fused_reference.rms_norm_quantize``.  XLA computes the means first."""
    options: dict[str, Any] = {
        "bits": bits,
        "block": block,
        "criterion": criterion,
        "colwise": colwise,
        "global_offset": global_offset,
    }
    if x.size == 0 or not fuses(block, x.shape[2]):
        return fused_reference.rms_norm_quantize(
            x, norm_scale, theta, seeds, epsilon=epsilon, **options, ops=quantize
        )
    batch, height, width = x.shape
    wide = x.astype(jnp.float32)
    rstd = fused_reference.find_rstd(jnp.mean(wide * wide, -1, keepdims=True), epsilon)
    operand, normalized, _ = _launch(
        "norm", x, norm_scale, rstd, theta, seeds, (batch, height, width), **options
    )
    return NormQuantized(operand, normalized, rstd)


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
) -> GateQuantized:
    """See ``fused_reference.silu_gate_quantize``."""
    options: dict[str, Any] = {
        "bits": bits,
        "block": block,
        "criterion": criterion,
        "colwise": colwise,
        "global_offset": global_offset,
    }
    batch, height, both = gate_up.shape
    if gate_up.size == 0 or not fuses(block, both // 2):
        return fused_reference.silu_gate_quantize(
            gate_up, theta, seeds, **options, ops=quantize
        )
    shape = batch, height, both // 2
    # theta stands for pointers that are not read.
    return GateQuantized(
        *_launch("gate", gate_up, theta, theta, theta, seeds, shape, **options)
    )


def silu_gate_grad_quantize(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rowwise: Rounding | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None = None,
) -> Layouts:
    """See ``fused_reference.silu_gate_grad_quantize``."""
    batch, height, width = dy.shape
    if dy.size == 0 or not fuses(block, width):
        return fused_reference.silu_gate_grad_quantize(
            dy,
            by_gate,
            by_up,
            seeds,
            bits=bits,
            block=block,
            rowwise=rowwise,
            colwise=colwise,
            global_offset=global_offset,
            ops=quantize,
        )
    out = _Outputs((batch, height, 2 * width), block)
    part, num_warps = CONFIGS["grad"]
    codes, scales, column_codes, column_scales = launch(
        _silu_gate_grad_quantize,
        dy,
        *_slots(by_gate.planes, bits, unused=seeds),
        by_gate.scales,
        *_slots(by_up.planes, bits, unused=seeds),
        by_up.scales,
        seeds,
        *(global_offset or whole(height)),
        height,
        width // block[1],
        outputs=[
            *out.by_rows(wanted=rowwise is not None),
            *out.by_columns(wanted=colwise is not None),
        ],
        grid=(out.programs // 2,),
        num_warps=num_warps,
        num_stages=1,
        r=block[0],
        c=block[1],
        PARTS=block[0] // part,
        BITS=bits,
        ROWS=rowwise,
        COLUMNS=colwise,
    )
    return Layouts(
        None if rowwise is None else Quantized(codes, scales),
        None if colwise is None else out.columns(column_codes, column_scales),
    )


class _Outputs(quantize.Matrices):
    """What is made: codes and scales, and packed codes."""

    def packed(self, bits: int, *, wanted: bool) -> list[jax.ShapeDtypeStruct]:
        """A plane for each width that a chunk may have, and scales."""

        def output(size: int, dtype: type, *, wanted: bool) -> jax.ShapeDtypeStruct:
            shape = (self.batch, self.rows, size) if wanted else (0,)
            return jax.ShapeDtypeStruct(shape, dtype)

        return [
            *(
                output(self.width // 8 * w, jnp.uint8, wanted=wanted and bool(bits & w))
                for w in _WIDTHS
            ),
            output(self.width // packing.GROUP, jnp.float32, wanted=wanted),
        ]


def _slots(
    planes: Sequence[jax.Array], bits: int, *, unused: jax.Array
) -> list[jax.Array]:
    """A plane for each width that a chunk may have."""
    by_width = dict(zip(packing.chunk_widths(bits), planes, strict=True))
    return [by_width.get(width, unused) for width in _WIDTHS]


def _launch(
    producer: str,
    x: jax.Array,
    norm_scale: jax.Array,
    rstd: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    shape: tuple[int, int, int],
    *,
    bits: int,
    block: Block,
    criterion: Criterion | None,
    colwise: Rounding | None,
    global_offset: GlobalOffset | None,
) -> tuple[Operand, Packed, Packed]:
    """The output of ``shape``, quantized, and one or two packed arrays."""
    out = _Outputs(shape, block)
    part, num_warps = CONFIGS[producer]
    residual_outputs = out.by_rows(wanted=criterion is not None)
    results = launch(
        _produce,
        x,
        norm_scale,
        rstd,
        theta,
        seeds,
        *(global_offset or whole(out.rows)),
        out.rows,
        out.blocks[1],
        outputs=[
            *out.by_rows(wanted=True),
            *residual_outputs,
            residual_outputs[1],
            *out.by_columns(wanted=colwise is not None),
            *out.packed(bits, wanted=True),
            *out.packed(bits, wanted=producer == "gate"),
        ],
        grid=(out.programs,),
        num_warps=num_warps,
        num_stages=1,
        r=block[0],
        c=block[1],
        PARTS=block[0] // part,
        PRODUCER=producer,
        BITS=bits,
        CRITERION=criterion,
        COLUMNS=colwise,
    )
    codes, scales, residual_codes, residual_scales, metric = results[:5]
    main = Quantized(codes, scales)
    by_columns = None if colwise is None else out.columns(*results[5:7])
    if criterion is None:
        nothing = jnp.zeros((out.batch, 0, 0), jnp.float32)
        operand = Operand(main, None, nothing, by_columns)
    else:
        residual = Quantized(residual_codes, residual_scales)
        operand = Operand(main, residual, metric, by_columns)
    first, second = (
        Packed(tuple(plane for plane in packed[:4] if plane.ndim == 3), packed[4])
        for packed in (results[7:12], results[12:17])
    )
    return operand, first, second


@triton.jit
def _produce(
    x,
    norm_scale,
    rstd,
    theta,
    seeds,
    origin_rows,
    origin_column,
    rows,
    across,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metric,
    column_codes,
    column_scales,
    first_8,
    first_4,
    first_2,
    first_1,
    first_scales,
    second_8,
    second_4,
    second_2,
    second_1,
    second_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    PRODUCER: tl.constexpr,
    BITS: tl.constexpr,
    CRITERION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    noise = seeds, origin_rows, origin_column
    part_r: tl.constexpr = r // PARTS
    columns = across * c
    batch, i, j, at, at_column = position(rows, columns, r, c)
    amax = 0.0
    for part in range(i * PARTS, (i + 1) * PARTS):
        y, first, second = _make(
            x, norm_scale, rstd, batch, part, j, rows, across, part_r, c, PRODUCER
        )
        planes = (first_8, first_4, first_2, first_1)
        store_packed(planes, first_scales, first, batch, part, j, rows, across, BITS)
        if PRODUCER == "gate":
            planes = (second_8, second_4, second_2, second_1)
            store_packed(
                planes, second_scales, second, batch, part, j, rows, across, BITS
            )
        amax = tl.maximum(amax, find_amax(y), propagate_nan=tl.PropagateNan.ALL)
    scale, inverse = scale_of(amax)
    tl.store(scales + at, scale)
    tl.store(column_scales + at_column, scale)
    lost, total = 0.0, 0.0
    for part in range(i * PARTS, (i + 1) * PARTS):
        y, _, _ = _make(
            x, norm_scale, rstd, batch, part, j, rows, across, part_r, c, PRODUCER
        )
        v = in_scale(y, inverse)
        rounded = nearest(v)
        store_rows(codes, rounded, batch, part, j, rows, columns)
        if COLUMNS == "nearest":
            store_columns(column_codes, rounded, batch, part, j, rows, columns)
        if COLUMNS == "stochastic":
            noisy = stochastic(v, noise, batch, part, j, rows)
            store_columns(column_codes, noisy, batch, part, j, rows, columns)
        if CRITERION == "l1" or CRITERION == "l1_rel":
            lost += sum_abs(residual_of(y, rounded, scale))
        if CRITERION == "l1_rel":
            total += sum_abs(y)
    if CRITERION is not None:
        value = metric_of(amax, scale, lost, total, CRITERION)
        tl.store(metric + at, value)
        residual_scale = 0.0
        # The second condition is false for an amax so large that scale * 127 overflows.
        if (value > tl.load(theta + batch)) & (scale * 127.0 < float("inf")):
            residual_amax = 0.0
            for part in range(i * PARTS, (i + 1) * PARTS):
                y, _, _ = _make(
                    x,
                    norm_scale,
                    rstd,
                    batch,
                    part,
                    j,
                    rows,
                    across,
                    part_r,
                    c,
                    PRODUCER,
                )
                residual = residual_of(y, nearest(in_scale(y, inverse)), scale)
                residual_amax = tl.maximum(residual_amax, find_amax(residual))
            residual_scale, residual_inverse = scale_of(residual_amax)
            for part in range(i * PARTS, (i + 1) * PARTS):
                y, _, _ = _make(
                    x,
                    norm_scale,
                    rstd,
                    batch,
                    part,
                    j,
                    rows,
                    across,
                    part_r,
                    c,
                    PRODUCER,
                )
                residual = residual_of(y, nearest(in_scale(y, inverse)), scale)
                rounded = nearest(in_scale(residual, residual_inverse))
                store_rows(residual_codes, rounded, batch, part, j, rows, columns)
        tl.store(residual_scales + at, residual_scale)


@triton.jit
def _make(
    x,
    norm_scale,
    rstd,
    batch,
    i,
    j,
    rows,
    across,
    r: tl.constexpr,
    c: tl.constexpr,
    PRODUCER: tl.constexpr,
):
    """A part of the output, in the type of x, and what is saved, in float32."""
    y, first, second = (), (), ()
    if PRODUCER == "norm":
        tiles = load(x, batch, i, j, rows, across * c, r, c)
        # Loaded as vectors: layouts of the matrices stay those of x then.
        column_gain = tl.load(norm_scale + (batch * across + j) * c + tl.arange(0, c))
        for k in tl.static_range(4):
            row = i * r + 4 * tl.arange(0, r // 4) + k
            row_rstd = tl.load(rstd + batch * rows + row, row < rows, 0.0)[:, None]
            wide = widen(tiles[k])
            y += ((wide * (row_rstd * column_gain[None, :])).to(tiles[k].dtype),)  # type: ignore[assignment]
            first += (wide * row_rstd,)  # type: ignore[assignment]
    else:
        gates = load(x, batch, i, 2 * j, rows, 2 * across * c, r, c)
        ups = load(x, batch, i, 2 * j + 1, rows, 2 * across * c, r, c)
        for k in tl.static_range(4):
            gate, up = widen(gates[k]), widen(ups[k])
            # The square of a reciprocal root, and a power of two: an instruction each.
            root = tl.rsqrt(1.0 + tl.exp2(gate * -LOG2_E))
            sigmoid = root * root
            silu = gate * sigmoid
            y += ((silu * up).to(gates[k].dtype),)  # type: ignore[assignment]
            first += (up * (sigmoid + silu * (1.0 - sigmoid)),)  # type: ignore[assignment]
            second += (silu,)  # type: ignore[assignment]
    return y, first, second


@triton.jit
def _silu_gate_grad_quantize(
    dy,
    gate_8,
    gate_4,
    gate_2,
    gate_1,
    gate_scales,
    up_8,
    up_4,
    up_2,
    up_1,
    up_scales,
    seeds,
    origin_rows,
    origin_column,
    rows,
    across,
    codes,
    scales,
    column_codes,
    column_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program quantizes a block of the gate's gradient and that of up's beside it."""
    noise = seeds, origin_rows, origin_column
    part_r: tl.constexpr = r // PARTS
    batch, i, j, _, _ = position(rows, across * c, r, c)
    columns = 2 * across * c
    down = tl.cdiv(rows, r)
    for half in tl.static_range(2):
        if half == 0:
            planes, factor_scales = (gate_8, gate_4, gate_2, gate_1), gate_scales
        else:
            planes, factor_scales = (up_8, up_4, up_2, up_1), up_scales
        to = 2 * j + half
        amax = 0.0
        for part in range(i * PARTS, (i + 1) * PARTS):
            y = _times(
                dy, planes, factor_scales, batch, part, j, rows, across, part_r, c, BITS
            )
            amax = tl.maximum(amax, find_amax(y), propagate_nan=tl.PropagateNan.ALL)
        scale, inverse = scale_of(amax)
        tl.store(scales + (batch * down + i) * (2 * across) + to, scale)
        tl.store(column_scales + (batch * (2 * across) + to) * down + i, scale)
        for part in range(i * PARTS, (i + 1) * PARTS):
            y = _times(
                dy, planes, factor_scales, batch, part, j, rows, across, part_r, c, BITS
            )
            v = in_scale(y, inverse)
            store_rounded(
                codes,
                column_codes,
                v,
                noise,
                batch,
                part,
                to,
                rows,
                columns,
                ROWS,
                COLUMNS,
            )


@triton.jit
def _times(
    dy,
    planes,
    scales,
    batch,
    i,
    j,
    rows,
    across,
    r: tl.constexpr,
    c: tl.constexpr,
    BITS: tl.constexpr,
):
    """A part of dy times what was packed, in the type of dy."""
    tiles = load(dy, batch, i, j, rows, across * c, r, c)
    factors = load_packed(planes, scales, batch, i, j, rows, across, r, BITS)
    y = ()
    for k in tl.static_range(4):
        y += ((widen(tiles[k]) * factors[k]).to(tiles[k].dtype),)  # type: ignore[assignment]
    return y
