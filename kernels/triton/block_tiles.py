"""A block in a Triton program: loaded, rounded, stored in either layout.

The rows of a block are taken by four: rows ``4 i + k``, for each ``k``, make a tile of
``r/4 x c`` elements.  A thread holds the same elements of all four tiles, so that four
codes of a column become one word without leaving its registers, and the transposition,
which goes through shared memory, moves words instead of bytes.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import rounding, scales

TINY = tl.constexpr(scales.TINY)
SPAN = tl.constexpr(rounding.ROW_GROUP)
# Adding it rounds a float32 below 2**22 to an integer, which the low bits then hold.
MAGIC = tl.constexpr(1.5 * 2**23)
# Four bytes of 128, less what the bits of MAGIC add to a sum of four shifted codes.
BIAS = tl.constexpr(-0xABF7F80)


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
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def measure(
    x, batch, i, j, rows, columns, r: tl.constexpr, c: tl.constexpr, PARTS: tl.constexpr
):
    """The tiles of a block's first part, and ``max |x|`` of all its parts."""
    tiles = load(x, batch, i * PARTS, j, rows, columns, r // PARTS, c)
    amax = find_amax(tiles)
    for part in range(i * PARTS + 1, (i + 1) * PARTS):
        top = find_amax(load(x, batch, part, j, rows, columns, r // PARTS, c))
        amax = tl.maximum(amax, top, propagate_nan=tl.PropagateNan.ALL)
    return tiles, amax


@triton.jit
def part_of(tiles, x, batch, part, j, rows, columns, PARTS: tl.constexpr):
    """The tiles of a part: those at hand if it is the only one, else loaded again."""
    if PARTS == 1:
        return tiles
    r: tl.constexpr = 4 * tiles[0].shape[0]
    return load(x, batch, part, j, rows, columns, r, tiles[0].shape[1])


@triton.jit
def store_rows(codes, rounded, batch, i, j, rows, columns):
    """Stores codes as the matrix lies."""
    r: tl.constexpr = 4 * rounded[0].shape[0]
    c: tl.constexpr = rounded[0].shape[1]
    row = 4 * tl.arange(0, r // 4)[:, None]
    column = tl.arange(0, c)[None, :]
    codes += (batch * rows + i * r) * columns + j * c
    for k in tl.static_range(4):
        inside = (row + k < rows - i * r) & (column < columns - j * c)
        tl.store(codes + (row + k) * columns + column, rounded[k].to(tl.int8), inside)


@triton.jit
def store_columns(codes, rounded, batch, i, j, rows, columns):
    """Stores the transposed codes, columns padded to 16 bytes."""
    r: tl.constexpr = 4 * rounded[0].shape[0]
    c: tl.constexpr = rounded[0].shape[1]
    # Sums are cheaper than masks.  128 more a code keeps bytes from borrowing.
    low = (rounded[1] << 8) + rounded[0]
    high = (rounded[3] << 8) + rounded[2]
    words = ((high << 16) + low + BIAS) ^ -0x7F7F7F80  # 0x80808080
    column = tl.arange(0, c)[:, None]
    word = tl.arange(0, r // 4)[None, :]
    height = tl.cdiv(rows, 16) * 4
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    codes += (batch * columns + j * c) * height + i * (r // 4)
    inside = (column < columns - j * c) & (word < height - i * (r // 4))
    tl.store(codes + column * height + word, tl.trans(words), inside)


@triton.jit
def store_rounded(
    codes,
    column_codes,
    v,
    noise,
    batch,
    i,
    j,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rounds values in units of their scale and stores them in the layouts wanted."""
    if ROWS == "nearest" or COLUMNS == "nearest":
        rounded = nearest(v)
        if ROWS == "nearest":
            store_rows(codes, rounded, batch, i, j, rows, columns)
        if COLUMNS == "nearest":
            store_columns(column_codes, rounded, batch, i, j, rows, columns)
    if ROWS == "stochastic" or COLUMNS == "stochastic":
        noisy = stochastic(v, noise, batch, i, j, rows)
        if ROWS == "stochastic":
            store_rows(codes, noisy, batch, i, j, rows, columns)
        if COLUMNS == "stochastic":
            store_columns(column_codes, noisy, batch, i, j, rows, columns)


@triton.jit
def find_amax(tiles):
    """``max |x|``, NaN if there is one: bits are ordered as the floats, NaN last."""
    top = tl.max(highest(magnitudes(tiles)).to(tl.int32))
    return from_bits(top, tiles[0].dtype)


@triton.jit
def magnitudes(tiles):
    """The bits of ``|x|``, as integers of its size."""
    if tiles[0].dtype == tl.float32:
        bits = [x.to(tl.int32, bitcast=True) & 0x7FFFFFFF for x in tiles]
    else:
        bits = [x.to(tl.int16, bitcast=True) & 0x7FFF for x in tiles]
    return bits


@triton.jit
def highest(bits):
    """The largest of the four, element by element."""
    return tl.maximum(tl.maximum(bits[0], bits[1]), tl.maximum(bits[2], bits[3]))


@triton.jit
def from_bits(bits, dtype: tl.constexpr):
    """The float32 of the bits, in int32, of a float of some type."""
    if dtype != tl.float32:
        bits = bits.to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr = 127.0, TINY: tl.constexpr = TINY):
    """The scale and its reciprocal, 0 where there are no codes but 0."""
    usable = (amax >= TINY) & (amax < float("inf"))
    divisor = tl.where(usable, amax, 1.0)
    special = tl.where(amax < TINY, 0.0, float("nan"))
    scale = tl.where(usable, tl.div_rn(divisor, LIMIT), special)
    return scale, tl.where(usable, tl.div_rn(LIMIT, divisor), 0.0)


@triton.jit
def widen(x):
    """To float32; for bfloat16 by bits, in fewer instructions than the compiler's."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def in_scale(tiles, inverse):
    """The tiles in units of the scale.

    Not clipped: a value may be one unit in the last place above 127, and rounds to 127
    all the same, with any noise.
    """
    return [widen(x) * inverse for x in tiles]


@triton.jit
def in_row_scales(tiles, inverses, i, rows):
    """Likewise, with one scale a row of the matrix."""
    r: tl.constexpr = 4 * tiles[0].shape[0]
    v = ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4)[:, None] + k
        inverse = tl.load(inverses + row, row < rows, 0.0)
        v += (widen(tiles[k]) * inverse,)
    return v


@triton.jit
def in_column_scales(tiles, inverses, j, columns):
    """Likewise, with one scale a column of the matrix."""
    c: tl.constexpr = tiles[0].shape[1]
    column = j * c + tl.arange(0, c)[None, :]
    return in_scale(tiles, tl.load(inverses + column, column < columns, 0.0))


@triton.jit
def nearest(v):
    """Codes in the low byte of integers."""
    return [(x + MAGIC).to(tl.int32, bitcast=True) for x in v]


@triton.jit
def stochastic(v, noise, batch, i, j, rows):
    """As ``nearest``, with ``rounding.noise``, of seeds and the parts of an origin."""
    seeds, origin_rows, origin_column = noise
    r: tl.constexpr = 4 * v[0].shape[0]
    c: tl.constexpr = v[0].shape[1]
    # A part below the last row is not stored, but must not read beyond the origin.
    span = tl.minimum(i * r // SPAN, tl.cdiv(rows, SPAN) - 1)
    first_row = tl.load(origin_rows + span) + i * r % SPAN
    seed = tl.load(seeds + batch)
    column = tl.load(origin_column) + j * c + tl.arange(0, c)[None, :]
    column_key = _fold(seed ^ 0x5851F42D, column) | 1
    rounded = ()
    for k in tl.static_range(2):
        pair = first_row // 2 + 2 * tl.arange(0, r // 4)[:, None] + k
        row_key = _fold(seed, pair) | 1
        product = row_key.to(tl.uint64) * column_key
        word = product.to(tl.uint32) + (product >> 32).to(tl.uint32) * 0x9E3779B9
        # Bits of 128 + odd / 2**16, for the low and the high half.
        word |= 0x10001
        first = (word & 0xFFFF) + 0x43000000
        second = (word >> 16) + 0x43000000
        noise = first.to(tl.float32, bitcast=True) - 128.5
        rounded += ((v[2 * k] + noise + MAGIC).to(tl.int32, bitcast=True),)
        noise = second.to(tl.float32, bitcast=True) - 128.5
        rounded += ((v[2 * k + 1] + noise + MAGIC).to(tl.int32, bitcast=True),)
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
        residual += (widen(tiles[k]) - scale * code,)
    return residual


@triton.jit
def metric_of(amax, scale, lost, total, CRITERION: tl.constexpr):
    """See ``reference.quantize_fallback``, given the sums of what INT8 lost and all."""
    if CRITERION == "absmax":
        value = amax
    else:
        value = tl.where(scale * 127.0 < float("inf"), lost, 0.0)
        if CRITERION == "l1_rel":
            value = value / tl.where(total > 0.0, total, 1.0)
    return tl.where(amax < float("inf"), value, float("nan"))


@triton.jit
def sum_abs(tiles):
    """``sum |x|``."""
    x = [tl.abs(widen(tile)) for tile in tiles]
    return tl.sum(x[0] + x[1] + x[2] + x[3])
