"""The Hadamard transform of a block as a program loads it: ``hadamard.transform_rows``.

The transform needs each value of a column of 128 rows seven times.  So a thread loads
whole columns, each row in a register of its own, and no value leaves its registers.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import hadamard
from fbq_jax.kernels.triton.block_codes import widen

SIZE = tl.constexpr(hadamard.SIZE)
SCALE = tl.constexpr(hadamard.SCALE)
FLIPS = tl.constexpr(hadamard.FLIPS)


@triton.jit
def load_transformed(x, at, r: tl.constexpr, c: tl.constexpr):
    """Loads the four tiles of a block of ``SIZE`` rows, transformed, in float32.

    ``block_tiles`` describes ``at`` and tiles.
    """
    tl.static_assert(r == SIZE)
    batch, i, j, rows, columns = at
    column = tl.arange(0, c)
    inside = column < columns - j * c
    x += (batch * rows + i * SIZE) * columns + j * c
    values = ()
    for row in tl.static_range(SIZE):
        value = widen(tl.load(x + row * columns + column, inside, 0.0))
        values += (-value if (FLIPS >> row) & 1 else value,)  # type: ignore[assignment]
    for stage in tl.static_range(7):
        values = _sums_and_differences(values, 1 << stage)
    tiles = ()
    for k in tl.static_range(4):
        tiles += (_stack(values, k),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _sums_and_differences(values, DISTANCE: tl.constexpr):
    """One stage of the transform."""
    results = ()
    for row in tl.static_range(SIZE):
        if row & DISTANCE:
            results += (values[row - DISTANCE] - values[row],)
        else:
            results += (values[row] + values[row + DISTANCE],)
    return results


@triton.jit
def _stack(values, FIRST: tl.constexpr):
    """Scales the rows ``4 i + FIRST`` and makes them one tile, in the same registers."""
    rows = ()
    for i in tl.static_range(SIZE // 4):
        rows += (values[4 * i + FIRST] * SCALE,)
    for level in tl.static_range(5):
        joined = ()
        for i in tl.static_range(SIZE // 8 >> level):
            joined += (tl.join(rows[i], rows[i + (SIZE // 8 >> level)]),)
        rows = joined
    return tl.trans(tl.reshape(rows[0], (values[0].shape[0], SIZE // 4)))
