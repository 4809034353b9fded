"""Loads and stores of the tiles of a block in a Triton program.

A program handles one block of ``r x c`` elements, or a part of one.  Its rows are
distributed over four tiles of ``r/4 x c``: tile ``k`` holds rows ``4 i + k``.  A thread
holds the same elements of all four tiles.  So it can join four codes of a column into
one 32-bit word in its registers, and transposition through shared memory moves words
instead of bytes.

Device functions share these arguments:

- ``at``: the tuple ``(batch, i, j, rows, columns)``.  The block is block ``(i, j)`` of
  matrix ``batch`` in a stack of matrices of ``rows x columns`` elements.
- ``tiles``: the four tiles, as a tuple or list.
- ``rounded``: four tiles with a code in the low byte of their elements.  For FP8 in
  columns, a tuple of one tile, whose words hold the codes of all four.
"""

import triton
import triton.language as tl

# Joins the low bytes of four words; the first is in the low byte of the result.
FOUR_BYTES = tl.constexpr(
    "{ .reg .b32 low, high; "
    "prmt.b32 low, $1, $2, 0x0040; "
    "prmt.b32 high, $3, $4, 0x0040; "
    "prmt.b32 $0, low, high, 0x5410; }"
)


@triton.jit
def locate_block(rows, columns, r: tl.constexpr, c: tl.constexpr):
    """Finds the block of this program.

    Consecutive programs read consecutive blocks of a row of blocks.

    Returns:
      ``at``, and the offsets of the block's scale in the rowwise and colwise scales.
    """
    down, across = tl.cdiv(rows, r), tl.cdiv(columns, c)
    program = tl.program_id(0)
    batch, block = program // (down * across), program % (down * across)
    i, j = block // across, block % across
    at = batch.to(tl.int64), i, j, rows, columns
    return at, (program, (batch * across + j) * down + i)


@triton.jit
def part_at(at, part):
    """``at`` for a part of a block; ``part`` counts from the top of the matrix."""
    batch, _, j, rows, columns = at
    return batch, part, j, rows, columns


@triton.jit
def load(source, at, r: tl.constexpr, c: tl.constexpr):
    """Loads the four tiles of a block in the dtype of x, with 0 outside the matrix.

    ``source`` is ``(x,)``; or, for the tile ``at`` of a group, ``(x, first_row,
    row_count)``: its first row in x, and the number of its rows.
    """
    batch, i, j, rows, columns = at
    first_row, height = batch * rows + i * r, rows - i * r
    if len(source) == 3:
        first_row, height = source[1] + i * r, source[2] - i * r
    row = 4 * tl.arange(0, r // 4)[:, None]
    column = tl.arange(0, c)[None, :]
    x = source[0] + first_row * columns + j * c
    tiles = ()
    for k in tl.static_range(4):
        inside = (row + k < height) & (column < columns - j * c)
        tile = tl.load(x + (row + k) * columns + column, inside, 0.0)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_rowwise(codes, rounded, at):
    """Stores codes in the layout of the matrix."""
    batch, i, j, rows, columns = at
    r: tl.constexpr = 4 * rounded[0].shape[0]
    c: tl.constexpr = rounded[0].shape[1]
    row = 4 * tl.arange(0, r // 4)[:, None]
    column = tl.arange(0, c)[None, :]
    codes = codes.to(tl.pointer_type(tl.int8), bitcast=True)
    codes += (batch * rows + i * r) * columns + j * c
    for k in tl.static_range(4):
        inside = (row + k < rows - i * r) & (column < columns - j * c)
        tl.store(codes + (row + k) * columns + column, rounded[k].to(tl.int8), inside)


@triton.jit
def store_colwise(codes, rounded, at):
    """Stores transposed codes, with each column padded to 16 bytes."""
    batch, i, j, rows, columns = at
    r: tl.constexpr = 4 * rounded[0].shape[0]
    c: tl.constexpr = rounded[0].shape[1]
    column = tl.arange(0, c)[:, None]
    word = tl.arange(0, r // 4)[None, :]
    height = tl.cdiv(rows, 16) * 4
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    codes += (batch * columns + j * c) * height + i * (r // 4)
    inside = (column < columns - j * c) & (word < height - i * (r // 4))
    tl.store(codes + column * height + word, tl.trans(join_codes(rounded)), inside)


@triton.jit
def join_codes(rounded):
    """Joins the codes of four tiles in words, of which one tile consists already."""
    if len(rounded) == 1:
        return rounded[0]
    else:  # noqa: RET505 (only one branch is compiled)
        return tl.inline_asm_elementwise(
            FOUR_BYTES,
            "=r,r,r,r,r",
            [rounded[0], rounded[1], rounded[2], rounded[3]],
            tl.int32,
            is_pure=True,
            pack=1,
        )
