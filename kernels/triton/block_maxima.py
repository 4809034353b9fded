"""``max |x|`` of each row and of each column of a block, held in a program's registers.

``block_tiles`` describes tiles.  The maxima are over bits: as integers, magnitudes have
the order of the floats, with NaN last.  Two neighbours of 16 bits share a word, so that
one instruction compares two values, and a move between threads moves two.
"""

import triton
import triton.language as tl

from fbq_jax.kernels.triton.block_codes import (
    elementwise_max,
    from_bits,
    magnitudes,
)


@triton.jit
def row_maxima(tiles):
    """``max |x|`` of all rows, as float32; NaN if there is one."""
    bits = magnitudes(tiles)
    if tiles[0].dtype == tl.float32:
        maxima = [tl.max(x, 1) for x in bits]
    else:
        maxima = [tl.reduce(_join_neighbours(x), 1, _larger_of_each) for x in bits]
    joined = tl.join(tl.join(maxima[0], maxima[2]), tl.join(maxima[1], maxima[3]))
    top = one_per_thread(tl.reshape(joined, (4 * tiles[0].shape[0],)))
    if tiles[0].dtype != tl.float32:
        top = tl.maximum(top & 0xFFFF, top >> 16)
    return from_bits(top, tiles[0].dtype)


@triton.jit
def column_maxima(tiles):
    """``max |x|`` of all columns, as float32; NaN if there is one."""
    bits = magnitudes(tiles)
    if tiles[0].dtype == tl.float32:
        top = tl.max(elementwise_max(bits), 0)
    else:
        words = [_join_neighbours(x) for x in bits]
        low, high = (
            _larger_of_each(words[0], words[1]),
            _larger_of_each(words[2], words[3]),
        )
        words = tl.reduce(_larger_of_each(low, high), 0, _larger_of_each)
        top = tl.join(words & 0xFFFF, words >> 16)
        top = tl.reshape(top, (tiles[0].shape[1],))
    return from_bits(one_per_thread(top), tiles[0].dtype)


@triton.jit
def one_per_thread(x):
    """Returns a vector whose elements, and what is made of them, threads share out.

    The compiler would rather compute a vector in each thread that needs it than move it
    through shared memory.  But it does not repeat what a reduction is made from, not
    even one along an axis of size 1.
    """
    return tl.max(x[:, None], 1)


@triton.jit
def _join_neighbours(bits):
    """Words of two magnitudes of 16 bits, neighbours in a row."""
    shape: tl.constexpr = (bits.shape[0], bits.shape[1] // 2, 2)
    low, high = tl.split(tl.reshape(bits, shape))
    return high.to(tl.int32) << 16 | low.to(tl.int32)


@triton.jit
def _larger_of_each(a, b):
    """The larger of the low and the larger of the high halves of two words.

    The halves are magnitudes of bfloat16 or float16.  Compared as bfloat16, they are in
    the order of integers, and the bits of a NaN may become 0x7FFF, a NaN in both.
    """
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
    )
