"""The Triton kernel of the block-scaled GEMM of INT8 or FP8 codes.

A program computes one tile of the output.  Each step of its loop multiplies one K block
on the tensor cores, scales the product and adds it to a float32 accumulator.  A product
of INT8 codes is exact.  One of FP8 codes starts at 0 as well, so that the tensor cores
sum no more than a block of them.
If ``m`` or ``n`` is 1, each row of that operand has its own scale in each K block.
A program cannot multiply while it scales and adds a product.  So tiles are small enough
for two or three programs to share a multiprocessor: one multiplies while another one
scales and adds.

If rows are in groups, each tile of ``tile_rows`` rows multiplies the matrix of rhs that
its entry of ``groups`` names, and nothing if that is negative.  If the contraction is
in groups, the K blocks are matrices ``[M, k]`` and ``[N, k]``, and each output sums a
range of them: ``groups`` holds the first one and their number.

With fallback, the loop follows the lists of ``gemm_schedule``.  A step reads a K block
of the first term or of the residual.  It selects the address to load from and does not
branch.
"""

from typing import Literal, NamedTuple

import triton
import triton.language as tl

from fbq_jax.kernels.quantized import Quantized, Unquantized, product_sides

Grouped = Literal["rows", "contraction"]


class Problem(NamedTuple):
    """The static description of a GEMM.

    Attributes:
      M: rows of lhs and of the output.
      N: rows of rhs and columns of the output.
      K: length of the rows of codes, a multiple of 16.
      m: rows of lhs that share a scale.
      k: length of a K block.
      n: rows of rhs that share a scale.
      fallback: whether lhs has a residual.
      magic_conversion: how products of INT8 codes become floats (``add_product``).
        Before Ada, the conversion of an integer is slow.
      grouped: what is in groups; None without groups.
      tile_rows: if rows are in groups, the number of adjacent rows with one group.
    """

    M: int
    N: int
    K: int
    m: int
    k: int
    n: int
    fallback: bool
    magic_conversion: bool
    grouped: Grouped | None = None
    tile_rows: int | None = None

    @classmethod
    def of(cls, lhs: Quantized | Unquantized, rhs: Quantized, sm: int) -> "Problem":
        """The product of two operands without groups."""
        m, k, n = product_sides(lhs, rhs)
        if isinstance(lhs, Unquantized):
            (_, M, K), fallback = lhs.values.shape, lhs.criterion is not None
        else:
            (_, M, K), fallback = lhs.shape, lhs.residual is not None
        return cls(M, rhs.shape[1], K + -K % 16, m, k, n, fallback, sm < 89)


@triton.jit
def gemm_kernel(
    lhs,
    lhs_scales,
    residual,
    residual_scales,
    order,
    step_scales,
    counts,
    rhs,
    rhs_scales,
    groups,
    step_count,
    out,
    P: tl.constexpr,
    C: tl.constexpr,
):
    """Computes one ``[BM, BN]`` tile of ``Problem`` P, as ``Config`` C says."""
    # Sizes are constants to save registers: the compiler folds them into addresses.
    # The number of steps is not a constant, or the compiler would unroll the loop.
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    HALF: tl.constexpr = BM // C.halves
    k_blocks: tl.constexpr = (P.K + P.k - 1) // P.k
    batch, row, column = _tile_origin(P.M, P.N, BM, BN, C.group)
    lhs_batch, rhs_batch = batch, batch
    if P.grouped == "rows":
        tl.static_assert(P.tile_rows % BM == 0)
        rhs_batch = tl.load(groups + row // P.tile_rows).to(tl.int64)
        if rhs_batch < 0:
            return
    if P.grouped == "contraction":
        lhs_batch = tl.load(groups + 2 * batch).to(tl.int64)
        rhs_batch = lhs_batch
        step_count = tl.load(groups + 2 * batch + 1)

    i = clamped_range(0, HALF, row, P.M, BM)
    lower_i = clamped_range(HALF, HALF, row, P.M, BM)
    j = clamped_range(0, BN, column, P.N, BN)
    c = tl.arange(0, P.k)
    lhs += (lhs_batch * P.M + row) * P.K
    residual += (lhs_batch * P.M + row) * P.K
    rhs += (rhs_batch * P.N + column) * P.K
    lhs_offsets = i[:, None] * P.K + c[None, :]
    lower_offsets = lower_i[:, None] * P.K + c[None, :]
    rhs_offsets = c[:, None] + j[None, :] * P.K

    tl.static_assert(C.halves == 1 or P.m >= BM)
    lhs_rows = scale_offsets(lhs_batch, row, i, 1, P.M, P.m, BM, k_blocks)
    lhs_scales += lhs_rows
    residual_scales += lhs_rows
    rhs_scales += scale_offsets(rhs_batch, column, j, 0, P.N, P.n, BN, k_blocks)

    if P.fallback:
        row_group: tl.constexpr = max(P.m, BM)
        list_index = batch * ((P.M + row_group - 1) // row_group) + row // row_group
        order += list_index * 2 * k_blocks
        step_scales += list_index * 2 * k_blocks
        step_count = tl.load(counts + list_index)
        next_code = tl.load(order)

    # From a K block to the next one.
    are_matrices: tl.constexpr = P.grouped == "contraction"
    tl.static_assert(P.k == P.K or not are_matrices)
    lhs_stride: tl.constexpr = P.M * P.K if are_matrices else P.k
    rhs_stride: tl.constexpr = P.N * P.K if are_matrices else P.k
    row_blocks: tl.constexpr = (P.M + P.m - 1) // P.m
    column_blocks: tl.constexpr = (P.N + P.n - 1) // P.n
    lhs_scale_stride: tl.constexpr = row_blocks if are_matrices or P.m == 1 else 1
    rhs_scale_stride: tl.constexpr = column_blocks if are_matrices or P.n == 1 else 1

    ALL: tl.constexpr = P.K % P.k == 0
    acc = tl.zeros((HALF, BN), tl.float32)
    lower_acc = acc
    for step in range(step_count):
        if P.fallback:
            # Read one step ahead, because the addresses of this step depend on it.
            code = next_code
            next_code = tl.load(order + tl.minimum(step + 1, step_count - 1))
            is_main = (code & 1) == 0
            block = code >> 1
            codes = tl.where(is_main, lhs, residual)
            if P.m >= BM:
                lhs_scale = tl.load(step_scales + step)
            else:
                scales = tl.where(is_main, lhs_scales, residual_scales)
                lhs_scale = tl.load(scales + block * lhs_scale_stride)
        else:
            block = step
            if are_matrices:
                block = tl.cast(step, tl.int64)
            codes = lhs
            lhs_scale = tl.load(lhs_scales + block * lhs_scale_stride)
        rhs_scale = tl.load(rhs_scales + block * rhs_scale_stride)
        scale = outer_product(lhs_scale, rhs_scale, P.m, P.n)
        inside = c < P.K - block * P.k  # not read if a block has all of K
        codes += block * lhs_stride
        a = load(codes + lhs_offsets, inside[None, :], ALL)
        b = load(rhs + block * rhs_stride + rhs_offsets, inside[:, None], ALL)
        acc = add_product(acc, a, b, scale, P.magic_conversion)
        if C.halves == 2:
            acc = _computed_first(acc)
            a = load(codes + lower_offsets, inside[None, :], ALL)
            lower_acc = add_product(lower_acc, a, b, scale, P.magic_conversion)

    out += (batch * P.M + row) * P.N + column
    store(out, acc, row, column, 0, P.M, P.N)
    if C.halves == 2:
        store(out + HALF * P.N, lower_acc, row, column, HALF, P.M, P.N)


@triton.jit
def _tile_origin(
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    group: tl.constexpr,
):
    """The batch index, first row and first column of this program's tile."""
    row_tiles: tl.constexpr = (M + BM - 1) // BM
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    band: tl.constexpr = group * column_tiles
    batch = (tl.program_id(0) // (row_tiles * column_tiles)).to(tl.int64)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    height = tl.minimum(row_tiles - tile // band * group, group)
    row = (tile // band * group + tile % band % height) * BM
    column = tile % band // height * BN
    return batch, row, column


@triton.jit
def clamped_range(
    start: tl.constexpr,
    length: tl.constexpr,
    origin,
    size: tl.constexpr,
    tile: tl.constexpr,
):
    """Indices in a tile, clamped to the last row or column of the matrix."""
    index = tl.arange(0, length)
    if start:
        index += start
    if size % tile != 0:
        index = tl.minimum(index, size - 1 - origin)
    return index


@triton.jit
def block_rows(
    batch, origin, index, size: tl.constexpr, block: tl.constexpr, tile: tl.constexpr
):
    """The row of scales of each index; one for all if a tile lies inside a block."""
    first = batch * ((size + block - 1) // block)
    if block >= tile:
        return first + origin // block
    else:  # noqa: RET505 (only one branch is compiled)
        return first + (origin + index) // block


@triton.jit
def scale_offsets(
    batch,
    origin,
    index,
    axis: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    k_blocks: tl.constexpr,
):
    """Where the scales of each index begin in ``[B, ceil(size/block), k_blocks]``.

    The offsets have a new axis, as ``tl.expand_dims``.  But scales of single rows are
    transposed, ``[B, k_blocks, size]``, so that a warp loads neighbours; and they have
    one axis, because the compiler loads each one again for every column of a matrix.
    """
    if block == 1:
        return batch * k_blocks * size + origin + index
    else:  # noqa: RET505 (only one branch is compiled)
        index = tl.expand_dims(index, axis)
        return block_rows(batch, origin, index, size, block, tile) * k_blocks


@triton.jit
def outer_product(lhs_scale, rhs_scale, m: tl.constexpr, n: tl.constexpr):
    """The product of the scales that ``scale_offsets`` found, for a tile."""
    if m == 1:
        lhs_scale = lhs_scale[:, None]
    if n == 1:
        rhs_scale = rhs_scale[None, :]
    return lhs_scale * rhs_scale


@triton.jit
def load(pointers, inside, ALL: tl.constexpr):
    """Loads codes, with 0 outside; ``ALL`` says that nothing is outside."""
    if ALL:
        return tl.load(pointers)
    else:  # noqa: RET505 (only one branch is compiled)
        return tl.load(pointers, inside, 0.0)


@triton.jit
def add_product(acc, a, b, scale, MAGIC_CONVERSION: tl.constexpr):
    """Returns ``acc`` plus the product of ``a`` and ``b`` times ``scale``.

    ``MAGIC_CONVERSION`` says how a product of INT8 codes becomes a float.
    """
    if a.dtype == tl.float8e4nv:
        product = tl.dot(a, b, out_dtype=tl.float32)
    elif MAGIC_CONVERSION:
        # While |x| <= 2**22, the bits of the float32 1.5 * 2**23 + x are the bits of
        # 1.5 * 2**23, plus x. The largest product, 256 * 127 * 127, is less than 2**22.
        start = tl.full(acc.shape, 0x4B400000, tl.int32)
        product = tl.dot(a, b, start, out_dtype=tl.int32)
        product = product.to(tl.float32, bitcast=True) - 12582912.0
    else:
        product = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    return tl.fma(product, scale, acc)


@triton.jit
def _computed_first(x):
    """Returns float32 x, after which the compiler keeps the code that follows.

    LLVM would merge the arithmetic on both halves of a tile and move it below the
    second product. Registers would then hold two INT32 products, and would spill.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def store(out, acc, row, column, start, M: tl.constexpr, N: tl.constexpr):
    """Stores the part of ``acc`` that lies inside the ``[M, N]`` matrix.

    ``out`` points to the first element of ``acc``, which is in row ``row + start``.
    """
    i = tl.arange(0, acc.shape[0])
    j = tl.arange(0, acc.shape[1])
    offsets = i[:, None] * N + j[None, :]
    columns = (j < N - column)[None, :]
    pointers, values = out + offsets, acc.to(out.dtype.element_ty)
    rows = (i < M - row - start)[:, None]
    tl.store(pointers, values, rows & columns)
