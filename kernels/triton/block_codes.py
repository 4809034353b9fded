"""Scales, codes, residuals and metrics of tiles, held in a program's registers.

``block_tiles`` describes tiles and ``at``, and how codes lie in int32 elements until
they are stored.  The mode of a layout is the rounding of its INT8 codes, ``"nearest"``
or ``"stochastic"``; or ``"float8"`` for FP8 codes; or None for no layout.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import reference, rounding, scales
from fbq_jax.kernels.triton.block_tiles import join_codes

TINY = tl.constexpr(scales.TINY)
LARGE = tl.constexpr(reference.LARGE)
SHRINK = tl.constexpr(reference.SHRINK)
FLOAT8_LIMIT = tl.constexpr(scales.FLOAT8_LIMIT)
FLOAT8_TINY = tl.constexpr(scales.FLOAT8_TINY)
LARGEST = tl.constexpr((2 - 2.0**-23) * 2.0**127)
ROW_GROUP = tl.constexpr(rounding.ROW_GROUP)
# Adding it to a float32 below 2**22 rounds that float to an integer, in the low bits of
# the sum.
MAGIC = tl.constexpr(1.5 * 2**23)
# Rounds four floats to E4M3; the first code is in the low byte of the word.  Before
# Hopper, the compiler's own conversion rounds twice, to float16 and then to FP8.
FOUR_FLOAT8 = tl.constexpr(
    "{ .reg .b16 low, high; "
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
# The sum of the magnitudes of four codes: their product with -1 or 1 for each sign.
SUM_OF_FOUR = tl.constexpr(
    "{ .reg .b32 signs; "
    "prmt.b32 signs, $1, 0, 0xba98; "
    "or.b32 signs, signs, 0x01010101; "
    "dp4a.s32.s32 $0, $1, signs, 0; }"
)


@triton.jit
def widen(x):
    """Converts to float32.

    A shift widens bfloat16 in fewer instructions than the compiler's conversion.
    """
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def find_amax(tiles, axis: tl.constexpr = None):
    """``max |x|`` of all tiles, as float32, along an axis; NaN if there is one.

    The maximum is over bits: as integers, magnitudes have the order of the floats, with
    NaN last.
    """
    top = tl.max(elementwise_max(magnitudes(tiles)).to(tl.int32), axis)
    return from_bits(top, tiles[0].dtype)


@triton.jit
def accumulate_amax(amax, tiles):
    """The maximum of ``amax`` and ``max |x|`` of the tiles; NaN if either is."""
    return tl.maximum(amax, find_amax(tiles), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitudes(tiles):
    """The bits of ``|x|``, as integers of the width of x."""
    if tiles[0].dtype == tl.float32:
        bits = [x.to(tl.int32, bitcast=True) & 0x7FFFFFFF for x in tiles]
    else:
        bits = [x.to(tl.int16, bitcast=True) & 0x7FFF for x in tiles]
    return bits


@triton.jit
def elementwise_max(tiles):
    """The largest of the four tiles at each element, or a single tile."""
    if len(tiles) == 1:
        return tiles[0]
    else:  # noqa: RET505 (only one branch is compiled)
        low, high = tl.maximum(tiles[0], tiles[1]), tl.maximum(tiles[2], tiles[3])
        return tl.maximum(low, high)


@triton.jit
def from_bits(bits, dtype: tl.constexpr):
    """Converts the bits of a ``dtype``, held in int32, to float32."""
    if dtype != tl.float32:
        bits = bits.to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_inverse(amax, LIMIT: tl.constexpr = 127.0, TINY: tl.constexpr = TINY):
    """See ``scales.scale_and_inverse``."""
    usable = (amax >= TINY) & (amax < float("inf"))
    divisor = tl.where(usable, amax, 1.0)
    special = tl.where(amax < TINY, 0.0, float("nan"))
    scale = tl.where(usable, tl.div_rn(divisor, LIMIT), special)
    return scale, tl.where(usable, tl.div_rn(LIMIT, divisor), 0.0)


@triton.jit
def scale_of_codes(amax, MODE: tl.constexpr):
    """See ``reference.scale_of_codes``."""
    if MODE == "float8":
        return scale_and_inverse(amax, FLOAT8_LIMIT, FLOAT8_TINY)
    return scale_and_inverse(amax)


@triton.jit
def multiply(tiles, inverse):
    """Tiles in units of their scale, in float32.

    There is no clipping.  A value may exceed the largest code by one unit in the last
    place, but it still rounds to that code, with any noise.
    """
    return [widen(x) * inverse for x in tiles]


@triton.jit
def nearest(v):
    """Rounds to nearest even."""
    return [(x + MAGIC).to(tl.int32, bitcast=True) for x in v]


@triton.jit
def stochastic(v, noise, at):
    """Rounds after adding the noise of ``rounding.noise``; see ``noise_keys``."""
    keys = noise_keys(noise, at, 4 * v[0].shape[0], v[0].shape[1])
    rounded = ()
    for k in tl.static_range(2):
        drawn = noise_of_pair(keys, k)
        for n in tl.static_range(2):
            rounded += (round_tile(v[2 * k + n], drawn[n], "stochastic"),)
    return rounded


@triton.jit
def noise_keys(noise, at, r: tl.constexpr, c: tl.constexpr):
    """What the noise of a block of ``r x c`` elements is made from, for its four tiles.

    ``noise`` is the tuple ``(seeds, offsets)``: a tuple of one array or of the arrays
    of ``rounding.MatrixSeeds``, and the two arrays of a ``GlobalOffset`` as one.
    """
    seeds, offsets = noise
    batch, i, j, rows, _ = at
    # A part below the last row is not stored, but must not read past the row offsets.
    groups = tl.cdiv(rows, ROW_GROUP)
    group = tl.minimum(i * r // ROW_GROUP, groups - 1)
    first_row = tl.load(offsets + group) + i * r % ROW_GROUP
    seed = tl.load(seeds[0] + batch)
    if len(seeds) > 1:
        place = tl.load(seeds[2] + batch)
        seed = _fold(seed, tl.load(seeds[1] + batch) - (place & 1))
        seed = _fold(_fold(seed, place >> 1 & 3), place >> 3)
    column = tl.load(offsets + groups) + j * c + tl.arange(0, c)
    column_key = _fold(seed ^ 0x5851F42D, column) | 1
    row_keys = ()
    for k in tl.static_range(2):
        pair = first_row // 2 + 2 * tl.arange(0, r // 4)[:, None] + k
        row_keys += (_fold(seed, pair) | 1,)  # type: ignore[assignment]
    return row_keys, column_key


@triton.jit
def noise_of_pair(keys, k: tl.constexpr):
    """The noise of tiles ``2 k`` and ``2 k + 1``."""
    row_keys, column_key = keys
    product = row_keys[k].to(tl.uint64) * column_key[None, :]
    word = product.to(tl.uint32) + (product >> 32).to(tl.uint32) * 0x9E3779B9
    # The bits of the float 128 + odd / 2**16, for the low and the high half.
    word |= 0x10001
    first = (word & 0xFFFF) + 0x43000000
    second = (word >> 16) + 0x43000000
    return [x.to(tl.float32, bitcast=True) - 128.5 for x in (first, second)]


@triton.jit
def round_tile(v, noise, MODE: tl.constexpr):
    """Rounds to nearest, or after adding noise; for FP8 it does neither."""
    if MODE == "stochastic":
        v += noise
    return v if MODE == "float8" else (v + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def float8(v):
    """Rounds to E4M3, ties to even: int8 tiles with the bits of codes."""
    rounded = ()
    for k in tl.static_range(4):
        rounded += (
            tl.inline_asm_elementwise(
                FOUR_FLOAT8, "=r,f,f,f,f", [v[k]], dtype=tl.int8, is_pure=True, pack=4
            ),
        )
    return rounded


@triton.jit
def float8_words(v):
    """``float8`` in words, each with the codes of all four tiles at an element."""
    words = tl.inline_asm_elementwise(
        FOUR_FLOAT8,
        "=r,f,f,f,f",
        [v[0], v[1], v[2], v[3]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return (words,)


@triton.jit
def _fold(seed, data):
    """See ``rounding.fold``."""
    return _mix(_mix(seed) + data.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _mix(x):
    """See ``rounding.mix``."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def magnitudes_of_codes(rounded):
    """The absolute values of codes as float32."""
    return [tl.abs(x.to(tl.float32, bitcast=True) - MAGIC) for x in rounded]


@triton.jit
def largest_row_sum(rounded):
    """The largest ``sum |codes|`` of a row."""
    sums = [tl.sum(x, axis=1) for x in magnitudes_of_codes(rounded)]
    return tl.max(elementwise_max(sums))


@triton.jit
def largest_column_sum(rounded):
    """The largest ``sum |codes|`` of a column, of at most 256 rows."""
    sums = tl.inline_asm_elementwise(
        SUM_OF_FOUR, "=r,r", [join_codes(rounded)], tl.uint32, is_pure=True, pack=1
    )
    # Two neighbours share a word.
    even, odd = tl.split(tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2)))
    sums = tl.sum(odd << 16 | even, axis=0)
    return tl.max(tl.maximum(sums & 0xFFFF, sums >> 16)).to(tl.float32)


@triton.jit
def residual_of(tiles, rounded, scale):
    """``x - scale * codes`` in float32, valid where ``scale * 127`` is finite."""
    residual = ()
    for k in tl.static_range(len(tiles)):
        code = rounded[k].to(tl.float32, bitcast=True) - MAGIC
        residual += (widen(tiles[k]) - scale * code,)
    return residual


@triton.jit
def shrink_of(scale):
    """The power of two by which a block's metric multiplies values before it sums."""
    return tl.where(scale > LARGE, SHRINK, 1.0)


@triton.jit
def sum_abs(tiles, shrink):
    """``sum |x| * shrink``."""
    x = [tl.abs(widen(tile)) * shrink for tile in tiles]
    return tl.sum(x[0] + x[1] + x[2] + x[3])


@triton.jit
def metric_of(scaling, sums, CRITERION: tl.constexpr):
    """The metric of ``reference.quantize``.

    ``scaling`` is ``(amax, scale, inverse)``; ``sums`` are ``sum |x - scale * codes|``
    and ``sum |x|``, both times ``shrink_of(scale)``.
    """
    amax, scale, _ = scaling
    error, total = sums
    if CRITERION == "absmax":
        value = amax
    else:
        value = tl.where(scale * 127.0 < float("inf"), error, 0.0)
        if CRITERION == "l1_rel":
            value = value / tl.where(total > 0.0, total, 1.0)
        else:
            grow = tl.where(scale > LARGE, 1 / SHRINK, 1.0)
            value = tl.minimum(value * grow, LARGEST)
    return tl.where(amax < float("inf"), value, float("nan"))
