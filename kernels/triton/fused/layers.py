"""The values of the layers that are fused with the quantization of their output.

``operands`` of a norm are the input, its scale, ``rstd`` and the number of blocks in a
row.  ``operands`` of a gate are the ``source`` of its input (``load_source``) and the
``spacing`` of its halves (``locate_halves``).
"""

import math

import triton
import triton.language as tl

from fbq_jax.kernels.triton.block_codes import widen
from fbq_jax.kernels.triton.block_tiles import load, load_of_group

LOG2_E = tl.constexpr(math.log2(math.e))
# Without the instructions for subnormal numbers, which do not change 1 + 2**x, nor the
# root of a number from 1 on.
EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
RSQRT = tl.constexpr("rsqrt.approx.ftz.f32 $0, $1;")


@triton.jit
def norm_values(operands, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the norm's output, in the dtype of x."""
    return normalize(operands, at, r, c)[0]


@triton.jit
def gate_values(operands, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the gate's output, in the dtype of ``gate_up``."""
    return silu_gate(operands, at, r, c)[0]


@triton.jit
def normalize(operands, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the output, in the dtype of x, and of ``x * rstd``, in float32."""
    x, norm_scale, rstd, groups = operands
    batch, i, j, rows, _ = at
    tiles = load(x, at, r, c)
    # Loaded as vectors, so that the matrices keep the layout of x.
    column_scale = tl.load(norm_scale + (batch * groups + j) * c + tl.arange(0, c))
    y, normalized = (), ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4) + k
        row_rstd = tl.load(rstd + batch * rows + row, row < rows, 0.0)[:, None]
        wide = widen(tiles[k])
        y += ((wide * (row_rstd * column_scale[None, :])).to(tiles[k].dtype),)  # type: ignore[assignment]
        normalized += (wide * row_rstd,)  # type: ignore[assignment]
    return y, (normalized,)


@triton.jit
def silu_gate(operands, at, r: tl.constexpr, c: tl.constexpr):
    """The tiles of the output and, in float32, of the factors of both gradients."""
    source, spacing = operands
    batch, i, j, rows, columns = at
    gate_at, up_at = locate_halves(j, spacing)
    gates = load_source(source, (batch, i, gate_at, rows, 2 * columns), r, c)
    ups = load_source(source, (batch, i, up_at, rows, 2 * columns), r, c)
    y, gate_factor, up_factor = (), (), ()
    for k in tl.static_range(4):
        gate, up = widen(gates[k]), widen(ups[k])
        # A power of two and the square of a reciprocal root: one instruction each.
        root = approximate(RSQRT, 1.0 + approximate(EXP2, gate * -LOG2_E))
        sigmoid = root * root
        silu = gate * sigmoid
        y += ((silu * up).to(gates[k].dtype),)  # type: ignore[assignment]
        gate_factor += (up * (sigmoid + silu * (1.0 - sigmoid)),)  # type: ignore[assignment]
        up_factor += (silu,)  # type: ignore[assignment]
    return y, (gate_factor, up_factor)


@triton.jit
def approximate(INSTRUCTION: tl.constexpr, x):
    """One instruction for each element."""
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def load_source(source, at, r: tl.constexpr, c: tl.constexpr):
    """Loads a block of ``source``: a tuple of a pointer, or that of load_of_group."""
    if len(source) == 1:
        return load(source[0], at, r, c)
    else:  # noqa: RET505 (only one branch is compiled)
        return load_of_group(source, at, r, c)


@triton.jit
def locate_halves(j, spacing):
    """The block columns of gate and up that belong to block column j of the output.

    ``spacing`` is the distance between two block columns of the gate, and the distance
    from one to that of up.
    """
    stride, distance = spacing
    return j * stride, j * stride + distance


@triton.jit
def find_half(column, groups, INTERLEAVED: tl.constexpr):
    """Reverses ``locate_halves`` for a block column of gate and up.

    Returns:
      The block column of the output, which has ``groups`` of them, and whether the
      column belongs to up.
    """
    if INTERLEAVED:
        return column // 2, column % 2 == 1
    else:  # noqa: RET505 (only one branch is compiled)
        return column % groups, column >= groups
