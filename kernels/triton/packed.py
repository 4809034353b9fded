"""Loads and stores of packed codes in a Triton program.

A block is 128 columns wide, so each of its rows is a group of
``fbq_jax.kernels.packing``.  ``block_tiles`` describes tiles and ``at``.  A packed
array is the tuple ``(planes, scales)`` with one plane for each width that a chunk may
have: 8, 4, 2 and 1 bits.  Planes for widths that ``BITS`` does not contain are neither
read nor written.  ``groups`` is the number of groups in a row.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import packing
from fbq_jax.kernels.triton.block_codes import MAGIC, scale_and_inverse

GROUP = tl.constexpr(packing.GROUP)
TINY = tl.constexpr(packing.TINY)
MAGIC_BITS = tl.constexpr(0x4B400000)  # of the float32 MAGIC


@triton.jit
def store_packed(packed, tiles, at, groups, BITS: tl.constexpr):
    """Quantizes each row of float32 tiles to ``BITS`` bits and stores packed codes."""
    planes, scales = packed
    batch, i, j, rows, _ = at
    r: tl.constexpr = 4 * tiles[0].shape[0]
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    row = i * r + tl.arange(0, r)
    group, inside = (batch * rows + row) * groups + j, row < rows
    words, row_scales = (), ()
    for k in tl.static_range(4):
        bits = tiles[k].to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
        scale, inverse = scale_and_inverse(amax, 1.0 * LIMIT, TINY)
        v = tiles[k] * inverse[:, None] + MAGIC
        words += (v.to(tl.int32, bitcast=True) + LIMIT,)  # type: ignore[assignment]
        row_scales += (scale[:, None],)  # type: ignore[assignment]
    # One store for all tiles: each store first moves values between threads, and all
    # warps wait for that.
    tl.store(scales + group[:, None], _interleave(row_scales), inside[:, None])
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            _store_plane(planes[p], words, group, inside, BITS, 8 >> p)


@triton.jit
def _store_plane(plane, words, group, inside, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores the chunks of one width, ``4 * WIDTH`` 32-bit words for each group."""
    packed = _interleave([_pack(x, BITS, WIDTH) for x in words])
    plane = plane.to(tl.pointer_type(tl.int32), bitcast=True)
    word = group[:, None] * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)[None, :]
    tl.store(plane + word, packed, inside[:, None])


@triton.jit
def _pack(words, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The chunks of one width, packed into 32-bit words."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    # Narrower chunks take the BITS & (WIDTH - 1) bits below this one.
    chunks = words >> (BITS & (WIDTH - 1)) & ((1 << WIDTH) - 1)
    # Four neighbours, held by one thread, form a word.  Only chunks that share a byte
    # come from different threads.
    chunks = tl.reshape(chunks, (words.shape[0], PER_BYTE, 4 * WIDTH, 4))
    chunks = tl.sum(chunks << (8 * tl.arange(0, 4))[None, None, None, :], 3)
    return tl.sum(chunks << (WIDTH * tl.arange(0, PER_BYTE))[None, :, None], 1)


@triton.jit
def _interleave(tiles):
    """Joins tiles to one array; its row ``4 i + k`` is row ``i`` of tile ``k``."""
    pairs = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
    shape: tl.constexpr = tiles[0].shape
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (4 * shape[0], shape[1]))


@triton.jit
def load_packed(packed, at, groups, r: tl.constexpr, BITS: tl.constexpr):
    """Dequantizes a block: four float32 tiles."""
    planes, scales = packed
    batch, i, j, rows, _ = at
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    tiles = ()
    for k in tl.static_range(4):
        row = i * r + 4 * tl.arange(0, r // 4)[:, None] + k
        group, inside = (batch * rows + row) * groups + j, row < rows
        words = tl.zeros((r // 4, GROUP), tl.int32)
        for p in tl.static_range(4):
            if BITS & (8 >> p):
                words = _append_chunks(words, planes[p], group, inside, 8 >> p)
        codes = (words + (MAGIC_BITS - LIMIT)).to(tl.float32, bitcast=True) - MAGIC
        tiles += (codes * tl.load(scales + group, inside, 0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _append_chunks(words, plane, group, inside, WIDTH: tl.constexpr):
    """Shifts words left and puts the chunks of one width into the low bits."""
    STRIDE: tl.constexpr = 16 * WIDTH
    column = tl.arange(0, GROUP)[None, :]
    chunks = tl.load(plane + group * STRIDE + column % STRIDE, inside, 0).to(tl.int32)
    chunks = chunks >> (column // STRIDE * WIDTH) & ((1 << WIDTH) - 1)
    return words << WIDTH | chunks
