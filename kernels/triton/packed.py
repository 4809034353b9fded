"""Packed codes in a Triton program: the groups of a block's rows, stored and loaded.

A block is 128 columns wide, so that each of its rows is a group of
``fbq_jax.kernels.packing``; rows are taken by four, as in ``tiles``.  There is a
pointer for each width that a chunk may have, from the widest; those of widths that are
not among the ``BITS`` are not used.
"""

import triton
import triton.language as tl

from fbq_jax.kernels import packing
from fbq_jax.kernels.triton.block_tiles import MAGIC, scale_of

GROUP = tl.constexpr(packing.GROUP)
TINY = tl.constexpr(packing.TINY)
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def store_packed(planes, scales, tiles, batch, i, j, rows, groups, BITS: tl.constexpr):
    """Quantizes the rows of float32 tiles, packs and stores the codes."""
    r: tl.constexpr = 4 * tiles[0].shape[0]
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    row = i * r + tl.arange(0, r)
    group, inside = (batch * rows + row) * groups + j, row < rows
    words, row_scales = (), ()
    for k in tl.static_range(4):
        bits = tiles[k].to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
        scale, inverse = scale_of(amax, 1.0 * LIMIT, TINY)
        v = tiles[k] * inverse[:, None] + MAGIC
        words += (v.to(tl.int32, bitcast=True) + LIMIT,)  # type: ignore[assignment]
        row_scales += (scale[:, None],)  # type: ignore[assignment]
    # Stored together: what is stored changes threads, which all warps wait for.
    tl.store(scales + group[:, None], _interleave(row_scales), inside[:, None])
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            _store_plane(planes[p], words, group, inside, BITS, 8 >> p)


@triton.jit
def _store_plane(plane, words, group, inside, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores the chunks of one width: of each group, ``4 * WIDTH`` words of bytes."""
    packed = _interleave([_pack(x, BITS, WIDTH) for x in words])
    plane = plane.to(tl.pointer_type(tl.int32), bitcast=True)
    word = group[:, None] * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)[None, :]
    tl.store(plane + word, packed, inside[:, None])


@triton.jit
def _pack(words, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The chunks of one width, in words of bytes."""
    A_BYTE: tl.constexpr = 8 // WIDTH
    # The chunks below these have the bits below their width.
    chunks = words >> (BITS & (WIDTH - 1)) & ((1 << WIDTH) - 1)
    # Neighbours, in one thread, make a word; words of chunks that share bytes move.
    chunks = tl.reshape(chunks, (words.shape[0], A_BYTE, 4 * WIDTH, 4))
    chunks = tl.sum(chunks << (8 * tl.arange(0, 4))[None, None, None, :], 3)
    return tl.sum(chunks << (WIDTH * tl.arange(0, A_BYTE))[None, :, None], 1)


@triton.jit
def _interleave(tiles):
    """Rows ``4 i + k``, from four tiles of rows ``i``."""
    pairs = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
    shape: tl.constexpr = tiles[0].shape
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (4 * shape[0], shape[1]))


@triton.jit
def load_packed(
    planes, scales, batch, i, j, rows, groups, r: tl.constexpr, BITS: tl.constexpr
):
    """The four float32 tiles of a block that packed codes stand for."""
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
    """Words with the chunks of one width below what they hold."""
    STRIDE: tl.constexpr = 16 * WIDTH
    column = tl.arange(0, GROUP)[None, :]
    chunks = tl.load(plane + group * STRIDE + column % STRIDE, inside, 0).to(tl.int32)
    chunks = chunks >> (column // STRIDE * WIDTH) & ((1 << WIDTH) - 1)
    return words << WIDTH | chunks
