"""Loads and stores of packed codes in a Triton program.

A block is 128 columns wide, so each of its rows is a group of
``fbq_jax.kernels.packing``.  ``block_tiles`` describes tiles and ``at``.  A packed
array is the tuple ``(data, scales, groups)``: two pointers, the first one to words of
four bytes, and the number of groups in a row.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import packing
from fbq_jax.kernels.triton.block_codes import MAGIC, scale_and_inverse

GROUP = tl.constexpr(packing.GROUP)
TINY = tl.constexpr(packing.TINY)
# Puts the low halves of two words into one.
LOW_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x5410;")
# Joins the low bytes of the halves of two words.
BYTES_OF_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x6420;")
# Puts chunks of four bytes $4 into the low bits of floats.  $5 is the position of the
# chunks in their bytes, $13 their masks; $9 has the other bits of the floats.
FLOATS_OF_CHUNKS = tl.constexpr(
    "{ .reg .b32 chunks; "
    "shr.b32 chunks, $4, $5; "
    "and.b32 chunks, chunks, $13; "
    "prmt.b32 $0, chunks, $9, 0x7650; "
    "prmt.b32 $1, chunks, $9, 0x7651; "
    "prmt.b32 $2, chunks, $9, 0x7652; "
    "prmt.b32 $3, chunks, $9, 0x7653; }"
)


@triton.jit
def store_saved(packed, saved, at, BITS: tl.constexpr):
    """Quantizes each row of float32 arrays to ``BITS`` bits and stores packed codes.

    ``saved`` has the tiles of each array.  ``packed`` has the matrices of all arrays,
    one array after the other in each matrix of the stack.
    """
    batch, i, j, rows, columns = at
    # Storing one array after the other would take more registers.
    chunks = ()
    for k in tl.static_range(len(saved)):
        chunks += (_pack(saved[k], BITS),)  # type: ignore[assignment]
    for k in tl.static_range(len(saved)):
        here = batch * len(saved) + k, i, j, rows, columns
        _store_chunks(packed, chunks[k], here, BITS)


@triton.jit
def _pack(tiles, BITS: tl.constexpr):
    """Quantizes each row of float32 tiles to ``BITS`` bits, and packs the codes.

    Returns:
      For each tile the scales of its rows, and the packed chunks of each plane.
    """
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    # The low bits of a sum with it are a code plus 2**(BITS - 1).
    START: tl.constexpr = MAGIC + 2 ** (BITS - 1)
    packed = ()
    # All planes of a tile before the next tile: the other order takes more registers.
    for k in tl.static_range(4):
        bits = tiles[k].to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
        scale, inverse = scale_and_inverse(amax, 1.0 * LIMIT, TINY)
        words = (tiles[k] * inverse[:, None] + START).to(tl.uint32, bitcast=True)
        planes = ()
        for p in tl.static_range(4):
            if BITS & (8 >> p):
                planes += (_pack_chunks(words, BITS, 8 >> p),)  # type: ignore[assignment]
            else:
                planes += ((),)  # type: ignore[assignment]
        packed += ((scale[:, None], planes),)  # type: ignore[assignment]
    return packed


@triton.jit
def _store_chunks(packed, chunks, at, BITS: tl.constexpr):
    """Stores what ``_pack`` returns."""
    data, scales, groups = packed
    batch, i, j, rows, _ = at
    r: tl.constexpr = 4 * chunks[0][0].shape[0]
    row = i * r + tl.arange(0, r)
    group, inside = (batch * rows + row) * groups + j, row < rows
    # One store for all tiles: each store first moves values between threads, and all
    # warps wait for that.
    row_scales = ()
    for k in tl.static_range(4):
        row_scales += (chunks[k][0],)  # type: ignore[assignment]
    tl.store(scales + group[:, None], _interleave(row_scales), inside[:, None])
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            of_tiles = ()
            for k in tl.static_range(4):
                of_tiles += (chunks[k][1][p],)  # type: ignore[assignment]
            _store_plane(data, _interleave(of_tiles), group, inside, BITS, 8 >> p)


@triton.jit
def _store_plane(data, chunks, group, inside, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores the chunks of one width, as many 32-bit words for each group."""
    word = tl.arange(0, chunks.shape[1])[None, :] + _first_byte(BITS, WIDTH) // 4
    tl.store(data + group[:, None] * (4 * BITS) + word, chunks, inside[:, None])


@triton.constexpr_function
def _first_byte(bits, width):
    """Where the plane of a width begins in the bytes of a group."""
    return sum(16 * wider for wider in (8, 4, 2) if bits & wider and wider > width)


@triton.jit
def _pack_chunks(words, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The chunks of one width, packed into 32-bit words."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    # Four neighbours, held by one thread, form a word.  Only chunks that share a byte
    # come from different threads.
    even, odd = tl.split(tl.reshape(words, (words.shape[0], PER_BYTE, 4 * WIDTH, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    low, high = _permute(LOW_HALVES, first, second), _permute(LOW_HALVES, third, fourth)
    # Narrower chunks take the BITS & (WIDTH - 1) bits below this one.
    SHIFT: tl.constexpr = BITS & (WIDTH - 1)
    chunks = _permute(BYTES_OF_HALVES, low >> SHIFT, high >> SHIFT)
    chunks &= 0x01010101 * ((1 << WIDTH) - 1)
    return tl.sum(chunks << (WIDTH * tl.arange(0, PER_BYTE))[None, :, None], 1)


@triton.jit
def _permute(ASM: tl.constexpr, a, b):
    """A permutation of the bytes of two words."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _interleave(tiles):
    """Joins tiles to one array; its row ``4 i + k`` is row ``i`` of tile ``k``."""
    pairs = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
    shape: tl.constexpr = tiles[0].shape
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (4 * shape[0], shape[1]))


@triton.jit
def load_packed(packed, at, r: tl.constexpr, BITS: tl.constexpr):
    """Dequantizes a block: four float32 tiles.

    A chunk becomes the low bits of a float, whose last bit has the chunk's weight in
    the word.  The sum of these floats is a constant plus the code, and exact.
    """
    data, scales, groups = packed
    batch, i, j, rows, _ = at
    tiles = ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4)[:, None] + k
        group, inside = (batch * rows + row) * groups + j, row < rows
        codes = tl.full((r // 4, GROUP), -_sum_of_zero(BITS), tl.float32)
        for p in tl.static_range(4):
            if BITS & (8 >> p):
                codes += _load_chunks(data, group, inside, BITS, 8 >> p)
        tiles += (codes * tl.load(scales + group, inside, 0.0),)  # type: ignore[assignment]
    return tiles


@triton.constexpr_function
def _sum_of_zero(bits):
    """The sum of the floats of ``_load_chunks`` for a code of 0."""
    shifts = [bits & (width - 1) for width in (8, 4, 2, 1) if bits & width]
    return sum(1.5 * 2.0 ** (23 + shift) for shift in shifts) + 2.0 ** (bits - 1)


@triton.jit
def _load_chunks(data, group, inside, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """``1.5 * 2**23`` plus the chunks of one width, times their weight in the word."""
    STRIDE: tl.constexpr = 16 * WIDTH
    SHIFT: tl.constexpr = BITS & (WIDTH - 1)
    column = tl.arange(0, GROUP)[None, :]
    byte = _first_byte(BITS, WIDTH) + column % STRIDE
    data = data.to(tl.pointer_type(tl.uint8), bitcast=True)
    chunks = tl.load(data + group * (16 * BITS) + byte, inside, 0)
    position = column // STRIDE * WIDTH
    bits: tl.constexpr = 0x4B400000 + (SHIFT << 23)  # of 1.5 * 2**(23 + SHIFT)
    masks: tl.constexpr = 0x01010101 * ((1 << WIDTH) - 1)
    return tl.inline_asm_elementwise(
        FLOATS_OF_CHUNKS,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [chunks, position, bits, masks],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
