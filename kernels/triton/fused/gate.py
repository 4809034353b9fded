"""The SiLU gate ``silu(gate) * up``, fused with the quantization of its output."""

import math
from typing import Any

import jax
import triton
import triton.language as tl

from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.fused_reference import GateQuantized
from fbq_jax.kernels.reference import Block
from fbq_jax.kernels.triton import quantize
from fbq_jax.kernels.triton.block_codes import accumulate_amax, widen
from fbq_jax.kernels.triton.block_quantize import quantize_with_fallback
from fbq_jax.kernels.triton.block_tiles import load, locate_block, part_at
from fbq_jax.kernels.triton.fused.launch_fused import can_fuse, launch_forward
from fbq_jax.kernels.triton.packed import store_packed

PART_ROWS = 16  # The fastest on an H200.
LOG2_E = tl.constexpr(math.log2(math.e))


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    **options: Any,
) -> GateQuantized:
    """See ``fused_reference.silu_gate_quantize``."""
    batch, rows, both = gate_up.shape
    shape = batch, rows, both // 2
    if not can_fuse(shape, block):
        return fused_reference.silu_gate_quantize(
            gate_up, theta, seeds, bits=bits, block=block, **options, ops=quantize
        )
    operand, (gate_factor, up_factor) = launch_forward(
        _silu_gate_quantize,
        gate_up,
        theta,
        seeds=seeds,
        shape=shape,
        saved=2,
        bits=bits,
        part_rows=PART_ROWS,
        block=block,
        **options,
    )
    return GateQuantized(operand, gate_factor, up_factor)


@triton.jit
def _silu_gate_quantize(
    gate_up,
    theta,
    seeds,
    row_offsets,
    column_offset,
    rows,
    groups,
    codes,
    scales,
    residual_codes,
    residual_scales,
    metrics,
    colwise_codes,
    colwise_scales,
    gate_plane_8,
    gate_plane_4,
    gate_plane_2,
    gate_plane_1,
    gate_scales,
    up_plane_8,
    up_plane_4,
    up_plane_2,
    up_plane_1,
    up_scales,
    r: tl.constexpr,
    c: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    CRITERION: tl.constexpr,
    COLWISE: tl.constexpr,
):
    shape: tl.constexpr = (PARTS, r // PARTS, c)
    gate_packed = (gate_plane_8, gate_plane_4, gate_plane_2, gate_plane_1), gate_scales
    up_packed = (up_plane_8, up_plane_4, up_plane_2, up_plane_1), up_scales
    noise = seeds, row_offsets, column_offset
    rowwise = (codes, scales), (residual_codes, residual_scales)
    outputs = rowwise, metrics, (colwise_codes, colwise_scales)
    modes: tl.constexpr = ("nearest", COLWISE, CRITERION)
    at, offsets = locate_block(rows, groups * c, r, c)
    amax = 0.0
    for part in range(at[1] * PARTS, (at[1] + 1) * PARTS):
        here = part_at(at, part)
        y, gate_factor, up_factor = _gate(gate_up, here, r // PARTS, c)
        store_packed(gate_packed, gate_factor, here, groups, BITS)
        store_packed(up_packed, up_factor, here, groups, BITS)
        amax = accumulate_amax(amax, y)
    quantize_with_fallback(
        _values, gate_up, (), amax, theta, noise, outputs, at, offsets, shape, modes
    )


@triton.jit
def _values(gate_up, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the output, in the dtype of ``gate_up``."""
    return _gate(gate_up, at, r, c)[0]


@triton.jit
def _gate(gate_up, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the output and, in float32, of the factors of both gradients."""
    batch, i, j, rows, columns = at
    gates = load(gate_up, (batch, i, 2 * j, rows, 2 * columns), r, c)
    ups = load(gate_up, (batch, i, 2 * j + 1, rows, 2 * columns), r, c)
    y, gate_factor, up_factor = (), (), ()
    for k in tl.static_range(4):
        gate, up = widen(gates[k]), widen(ups[k])
        # A power of two and the square of a reciprocal root: one instruction each.
        root = tl.rsqrt(1.0 + tl.exp2(gate * -LOG2_E))
        sigmoid = root * root
        silu = gate * sigmoid
        y += ((silu * up).to(gates[k].dtype),)  # type: ignore[assignment]
        gate_factor += (up * (sigmoid + silu * (1.0 - sigmoid)),)  # type: ignore[assignment]
        up_factor += (silu,)  # type: ignore[assignment]
    return y, gate_factor, up_factor
