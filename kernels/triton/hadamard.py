"""The Hadamard transform of a block as a program loads it: ``hadamard.transform_rows``.

The transform needs each value of a column of 128 rows seven times.  So a thread holds
whole columns, and no value leaves its registers between the stages.  To the compiler,
a block is one vector, of which the threads of a program hold neighbours: element
``row * c + column`` belongs to the thread of ``column`` if there are ``c`` threads.
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

    ``block_tiles`` describes ``at`` and tiles.  Programs have ``c`` threads.
    """
    tl.static_assert(r == SIZE)
    batch, i, j, rows, columns = at
    x += (batch * rows + i * SIZE) * columns + j * c
    index = tl.arange(0, SIZE * c)
    row, column = index // c, index % c
    inside = column < columns - j * c
    values = _flip(widen(tl.load(x + row * columns + column, inside, 0.0)), row)
    for _ in tl.static_range(7):
        values = _sums_and_differences(values, c)
    return _four_tiles(values * SCALE, c)


@triton.jit
def _flip(values, row):
    """Flips the sign of some rows."""
    flips = tl.where(row < 32, FLIPS[0], FLIPS[1])
    flips = tl.where(row < 64, flips, tl.where(row < 96, FLIPS[2], FLIPS[3]))
    signs = (flips >> (row % 32)) << 31
    return (values.to(tl.int32, bitcast=True) ^ signs).to(tl.float32, bitcast=True)


@triton.jit
def _sums_and_differences(values, c: tl.constexpr):
    """One stage of the transform.

    Its pairs are in the upper and the lower half of the rows, and become neighbours:
    seven stages restore the order.
    """
    first, second = _halves(values)
    pairs = tl.join(first + second, first - second)
    pairs = tl.permute(tl.reshape(pairs, (SIZE // 2, c, 2)), (0, 2, 1))
    return tl.reshape(pairs, (SIZE * c,))


@triton.jit
def _halves(values):
    size: tl.constexpr = values.shape[0] // 2
    return tl.split(tl.trans(tl.reshape(values, (2, size))))


@triton.jit
def _every_second_row(values, c: tl.constexpr):
    """The even and the odd rows."""
    size: tl.constexpr = values.shape[0] // 2
    pairs = tl.permute(tl.reshape(values, (size // c, 2, c)), (0, 2, 1))
    return tl.split(tl.reshape(pairs, (size, 2)))


@triton.jit
def _four_tiles(values, c: tl.constexpr):
    even, odd = _every_second_row(values, c)
    first, third = _every_second_row(even, c)
    second, fourth = _every_second_row(odd, c)
    shape: tl.constexpr = (SIZE // 4, c)
    return [tl.reshape(tile, shape) for tile in (first, second, third, fourth)]


@triton.jit
def computed_once(tiles):
    """Returns tiles that were made from transformed ones.

    The compiler would repeat all stages of the transform, once for the threads that
    find scales, and once for those that store codes.  But it does not repeat what a
    reduction is made from, not even one along an axis of size 1.
    """
    return [tl.max(tile[:, :, None], 2) for tile in tiles]
