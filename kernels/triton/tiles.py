"""A block in a Triton program: loaded, rounded, stored in either layout.

The rows of a block are taken by four: rows ``4 i + k``, for each ``k``, make a tile of
``r/4 x c`` elements.  A thread holds the same elements of all four tiles, so that four
codes of a column become one word without leaving its registers, and the transposition,
which goes through shared memory, moves words instead of bytes.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import reference

TINY = tl.constexpr(reference.TINY)
# Adding it rounds a float32 below 2**22 to an integer, which the low bits then hold.
MAGIC = tl.constexpr(1.5 * 2**23)


@triton.jit
def position(rows, columns, r: tl.constexpr, c: tl.constexpr):
    """This program's matrix and block, and where that is among all, by row and column.

    Programs that run together read whole rows together.
    """
    down, across = tl.cdiv(rows, r), tl.cdiv(columns, c)
    program = tl.program_id(0)
    batch, block = program // (down * across), program % (down * across)
    i, j = block // across, block % across
    return batch.to(tl.int64), i, j, program, (batch * across + j) * down + i


@triton.jit
def load(x, batch, i, j, rows, columns, r: tl.constexpr, c: tl.constexpr):
    """The four tiles of a block, in the type of x, 0 beyond the matrix."""
    row = 4 * tl.arange(0, r // 4)[:, None]
    column = tl.arange(0, c)[None, :]
    x += (batch * rows + i * r) * columns + j * c
    tiles = ()
    for k in tl.static_range(4):
        inside = (row + k < rows - i * r) & (column < columns - j * c)
        tile = tl.load(x + (row + k) * columns + column, inside, 0.0)
        tiles += (tile,)
    return tiles


@triton.jit
def store_rows(codes, rounded, finite, batch, i, j, rows, columns):
    """Stores codes as the matrix lies; zeros if the block is not finite."""
    r: tl.constexpr = 4 * rounded[0].shape[0]
    c: tl.constexpr = rounded[0].shape[1]
    row = 4 * tl.arange(0, r // 4)[:, None]
    column = tl.arange(0, c)[None, :]
    codes += (batch * rows + i * r) * columns + j * c
    for k in tl.static_range(4):
        inside = (row + k < rows - i * r) & (column < columns - j * c)
        to = codes + (row + k) * columns + column
        # A select instead of the branch would cost every block.
        if finite:
            tl.store(to, rounded[k].to(tl.int8), inside)
        else:
            tl.store(to, tl.zeros((r // 4, c), tl.int8), inside)


@triton.jit
def store_columns(codes, rounded, finite, batch, i, j, rows, columns):
    """Stores the transposed codes, columns padded to 16 bytes; likewise zeros."""
    r: tl.constexpr = 4 * rounded[0].shape[0]
    c: tl.constexpr = rounded[0].shape[1]
    low = [x & 0xFF for x in rounded]
    words = low[0] | low[1] << 8 | low[2] << 16 | low[3] << 24
    column = tl.arange(0, c)[:, None]
    word = tl.arange(0, r // 4)[None, :]
    height = tl.cdiv(rows, 16) * 4
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    codes += (batch * columns + j * c) * height + i * (r // 4)
    inside = (column < columns - j * c) & (word < height - i * (r // 4))
    to = codes + column * height + word
    if finite:
        tl.store(to, tl.trans(words), inside)
    else:
        tl.store(to, tl.zeros((c, r // 4), tl.int32), inside)


@triton.jit
def find_amax(tiles):
    """``max |x|``, NaN if there is one: bits are ordered as the floats, NaN last."""
    x = tiles[0]
    if x.dtype == tl.float32:
        bits = [tl.abs(x).to(tl.int32, bitcast=True) for x in tiles]
    else:
        bits = [x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF for x in tiles]
    top = tl.max(tl.maximum(tl.maximum(bits[0], bits[1]), tl.maximum(bits[2], bits[3])))
    if x.dtype != tl.float32:
        top = top.to(tl.int16)
    return top.to(x.dtype, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(amax):
    """The scale and its reciprocal, 0 where there are no codes but 0."""
    usable = (amax >= TINY) & (amax < float("inf"))
    divisor = tl.where(usable, amax, 1.0)
    special = tl.where(amax < TINY, 0.0, float("nan"))
    scale = tl.where(usable, tl.div_rn(divisor, 127.0), special)
    return scale, tl.where(usable, tl.div_rn(127.0, divisor), 0.0)


@triton.jit
def in_scale(tiles, inverse):
    """The tiles in units of the scale."""
    return [tl.clamp(x.to(tl.float32) * inverse, -127.0, 127.0) for x in tiles]


@triton.jit
def nearest(v):
    """Codes in the low byte of integers."""
    return [(x + MAGIC).to(tl.int32, bitcast=True) for x in v]


@triton.jit
def stochastic(v, seed, i, j):
    """As ``_nearest``, with the noise of ``rounding.noise``."""
    r: tl.constexpr = 4 * v[0].shape[0]
    c: tl.constexpr = v[0].shape[1]
    column = j * c + tl.arange(0, c)[None, :]
    column_key = _fold(seed ^ 0x5851F42D, column)
    rounded = ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4)[:, None] + k
        x = _fold(seed, row) + column_key
        # As _mix, whose last step does not touch the upper half, the only one used.
        x = (x ^ (x >> 16)) * 0x85EBCA6B
        x = (x ^ (x >> 13)) * 0xC2B2AE35
        # 1 + bits / 2**16, less 1 + 32767.5 / 2**16.
        bits = (x >> 9) & 0x7FFF80 | 0x3F800000
        noise = bits.to(tl.float32, bitcast=True) - 1.49999237060546875
        rounded += ((v[k] + noise + MAGIC).to(tl.int32, bitcast=True),)
    return rounded


@triton.jit
def _fold(seed, data):
    return _mix(_mix(seed) + data.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def residual_of(tiles, rounded, scale):
    """What INT8 lost, given that ``scale * 127`` is finite."""
    residual = ()
    for k in tl.static_range(4):
        code = rounded[k].to(tl.float32, bitcast=True) - MAGIC
        residual += (tiles[k].to(tl.float32) - scale * code,)
    return residual


@triton.jit
def metric_of(tiles, rounded, amax, scale, CRITERION: tl.constexpr):
    """See ``reference.quantize_fallback``."""
    if CRITERION == "absmax":
        value = amax
    else:
        value = _sum(residual_of(tiles, rounded, scale))
        value = tl.where(scale * 127.0 < float("inf"), value, 0.0)
        if CRITERION == "l1_rel":
            total = _sum(tiles)
            value = value / tl.where(total > 0.0, total, 1.0)
    return tl.where(amax < float("inf"), value, float("nan"))


@triton.jit
def _sum(tiles):
    x = [tl.abs(tile.to(tl.float32)) for tile in tiles]
    return tl.sum(x[0] + x[1] + x[2] + x[3])
