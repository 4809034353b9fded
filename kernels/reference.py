"""The definitions of quantization and of the GEMMs of codes, in plain ``jax.numpy``.

These functions define the numerics of the library (arXiv:2503.08040).  They
run on CPUs, and all kernels are tested against them.

An operand is a stack of matrices ``[B, R, C]``.  A grid of blocks of
``block = (r, c)`` elements covers each matrix; blocks at the lower and right edges may
be partial.  For each block,

    amax  = max |x|
    scale = amax / 127                                  (float32)
    v     = clip(x * (127 / amax), -127, 127)           (float32)
    codes = round_half_even(v + noise)                  (int8, never -128)

with the noise of ``rounding``, or none for nearest rounding.

Two kinds of blocks are special:

- If ``amax < 2**-118``, then the scale or its reciprocal would not be a normal float.
  The block counts as zero: its scale and its codes are 0.
- If a block holds a NaN or an Inf, then its scale is NaN, and so is everything computed
  from it.  Quantization never hides a diverged run.  The codes have no meaning (here
  they are 0).

Codes may also be in FP8, in the format E4M3 of arXiv:2209.05433 without infinities, of
3 bits after the leading one.  Its largest value is 448, so

    scale = amax / 448                                  (float32)
    v     = clip(x * (448 / amax), -448, 448)           (float32)
    codes = v rounded to E4M3, ties to even             (float8_e4m3fn)

without noise.  Values below ``2**-6`` in magnitude are multiples of ``2**-9``, and a
zero keeps its sign.  A block counts as zero if ``amax < 2**-117``.

A GEMM multiplies two scales in float32 before it scales a product of codes.  The
product of the scales is a normal float if the product ``a`` of both blocks' ``amax`` is
at least ``2**-112`` and below ``2**141``.  Below, CPUs take the product of the scales
for 0, and each product of two elements loses at most ``2**-112``; GPUs keep fewer bits
of it, and lose at most ``2**-136``.  Above, the product of the scales is Inf, and so
the sum is Inf or, if a product of codes is 0, NaN.  A kernel with running sums in
float32 (Mosaic's, for outputs of 16 bits) reaches Inf or NaN from ``a = 2**118``.

Every implementation gives the same codes and scales, bit for bit, on every device.
Three rules ensure that.  A product is clipped before something is added to it, because
a compiler could otherwise fuse both operations into one rounding.  Quotients come from
``scales.divide``, because XLA does not round them correctly.  And XLA does not merge
this code with what computes its operands (``fbq_jax.ops.op.LocalOp``).  There is one
exception: on CPUs, XLA takes subnormal values, below ``2**-126``, for 0.  Noise can
round them up on GPUs in a block whose ``amax`` is below ``2**-103``; in others, they
are too small for that, and without noise in all.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import rounding
from fbq_jax.kernels.apart import call_apart
from fbq_jax.kernels.quantized import (
    Block,
    CodeDtype,
    Criterion,
    Layout,
    Layouts,
    Quantized,
    Term,
    Unquantized,
    product_block,
)
from fbq_jax.kernels.scales import (
    FLOAT8_LIMIT,
    FLOAT8_TINY,
    TINY,
    find_amax,
    scale_and_inverse_by_platform,
)
from fbq_jax.kernels.sources import Matrix, Source

LARGE = 2.0**88  # The metrics of blocks with a larger scale sum their values times
SHRINK = 2.0**-32  # this power of two, lest a sum overflow.

MAX_INT32_K = 2**17  # The longest K of exact products: 127 * 127 * K fits into int32.


def _identity(x: jax.Array) -> jax.Array:
    return x


class AmaxReduce(NamedTuple):
    """Reduces ``max |x|`` of blocks over the devices that share them.

    Each function maps the maxima ``[B, R/r, C/c]`` of the local parts of blocks to the
    maxima of the whole blocks.  By default devices share no blocks.

    Attributes:
      rowwise: for the blocks of the rowwise layout.
      colwise: for the blocks of the colwise layout.
    """

    rowwise: Callable[[jax.Array], jax.Array] = _identity
    colwise: Callable[[jax.Array], jax.Array] = _identity


NO_AMAX_REDUCE = AmaxReduce()


def quantize(
    source: Source,
    seeds: rounding.Seeds,
    theta: jax.Array | None = None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    criterion: Criterion | None = None,
    bound: float = 127.0,
    dtype: CodeDtype = "int8",
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """Quantizes matrices in one or both layouts.

    Noise belongs to an element, so layouts with equal blocks and roundings have equal
    codes.

    With a criterion, the rowwise layout has a second INT8 term in blocks whose metric
    exceeds theta: the fallback quantization of arXiv:2503.08040.  The residual
    ``x - scale * codes`` (float32) of a block that falls back is quantized to nearest,
    with its own scale.  The criterion selects the metric of a block:

    - ``absmax``: ``max |x|``;
    - ``l1``: ``sum |x - scale * codes|``, the error of plain INT8, or the largest
      float if that is smaller;
    - ``l1_rel``: that error divided by ``sum |x|``, and 0 for an all-zero block.

    A block with a NaN or an Inf has metric NaN and never falls back.

    Args:
      source: the matrices ``[B, R, C]``, or what they are computed from.
      seeds: the seeds of stochastic rounding, of B matrices.
      theta: float32 ``[B]``, the thresholds, in units of the metric; None without a
        criterion.  A threshold that is unset, negative or NaN, counts as 0 (see
        ``threshold_reference``).
      rowwise: how the matrices are quantized, or None to omit this layout.
      colwise: how their transposes are quantized, or None to omit this layout.
      criterion: ``"absmax"``, ``"l1"`` or ``"l1_rel"``, for a rowwise layout that is
        rounded to nearest and has several scales per row; None for no fallback.
      bound: the value that ``amax`` is scaled to in INT8.  With 127.5, values fill the
        interval that rounds to the last code; they are still clipped to 127.
      dtype: the dtype of the codes.  FP8 codes are rounded to nearest.
      global_offset: the offset of this shard in the global matrix; selects its noise.
      amax_reduce: the reduction of maxima over devices that share blocks.

    Returns:
      The ``Layouts``.  The scales of a layout with one scale per row or per matrix are
      ``[B, R, 1]``.
    """
    check_layouts(rowwise, colwise, criterion, dtype)
    x, saved = source.compute()
    x = x.astype(jnp.float32)

    def draw_noise(seeds: rounding.Seeds) -> jax.Array:
        draw = functools.partial(
            rounding.noise,
            rows=x.shape[1],
            columns=x.shape[2],
            global_offset=global_offset,
        )
        return jax.vmap(draw)(rounding.fold_seeds(seeds))

    @functools.cache  # both layouts may round the same blocks alike
    def codes_of(
        mode: rounding.Rounding,
        block: Block,
        reduce: Callable[[jax.Array], jax.Array],
    ) -> _Codes:
        noise = functools.partial(draw_noise, seeds) if mode == "stochastic" else None
        return _quantize(x, block, noise, reduce, bound, dtype)

    main = transposed = metric = None
    if rowwise is not None:
        codes = codes_of(rowwise.rounding, rowwise.block, amax_reduce.rowwise)
        main = codes.as_quantized(rowwise, x.shape, sum_axis=4)
        if criterion is not None:
            assert theta is not None
            residual, metric = _residual_term(codes, criterion, theta)
            second = residual.as_quantized(rowwise, x.shape, sum_axis=None)
            main = Quantized(main.main, second.main, main.block)
    if colwise is not None:
        codes = codes_of(colwise.rounding, colwise.block, amax_reduce.colwise)
        transposed = codes.as_quantized(colwise, x.shape, sum_axis=2).mT
    if transposed is not None and colwise is not None and not colwise.is_split:
        transposed = _one_scale_per_row(transposed)
    if main is not None and rowwise is not None and not rowwise.is_split:
        main = _one_scale_per_row(main)
    return Layouts(main, transposed, metric, saved)


def check_layouts(
    rowwise: Layout | None,
    colwise: Layout | None,
    criterion: Criterion | None,
    dtype: CodeDtype,
) -> None:
    """Raises ValueError if a quantization does not support its options."""
    layouts = [layout for layout in (rowwise, colwise) if layout is not None]
    if dtype == "float8_e4m3fn" and any(
        layout.rounding == "stochastic" or layout.sums for layout in layouts
    ):
        raise ValueError(
            f"FP8 codes take nearest rounding and no sums; got {rowwise=}, {colwise=}"
        )
    if criterion is not None and (
        rowwise is None or rowwise.rounding != "nearest" or not rowwise.is_split
    ):
        raise ValueError(
            "fallback takes a rowwise layout in blocks, rounded to nearest; got "
            f"{rowwise=}"
        )


class _Codes(NamedTuple):
    """A quantized matrix in tiles ``[B, R/r, r, C/c, c]``.

    Attributes:
      tiles: the values, float32.
      codes: their codes, int8 or float8_e4m3fn.
      scales: float32 ``[B, R/r, C/c]``.
    """

    tiles: jax.Array
    codes: jax.Array
    scales: jax.Array

    def as_quantized(
        self, layout: Layout, shape: tuple[int, ...], *, sum_axis: int | None
    ) -> Quantized:
        """The operand of ``shape``; sums, if asked for, are along ``sum_axis``."""
        batch, i, r, j, c = self.codes.shape
        codes = self.codes.reshape(batch, i * r, j * c)[:, : shape[1], : shape[2]]
        sums = None
        if layout.sums and sum_axis is not None:
            magnitudes = jnp.abs(self.codes.astype(jnp.float32))
            of_vectors = jnp.sum(magnitudes, axis=sum_axis, keepdims=True)
            sums = jnp.max(of_vectors, axis=(2, 4))
        return Quantized(Term(codes, self.scales, sums), None, layout.block)


def _quantize(
    x: jax.Array,
    block: Block,
    noise: Callable[[], jax.Array] | None = None,
    amax_reduce: Callable[[jax.Array], jax.Array] = _identity,
    bound: float = 127.0,
    dtype: CodeDtype = "int8",
) -> _Codes:
    """Quantizes float32 ``[B, R, C]``; ``noise`` makes an array of its shape."""
    tiles = _to_tiles(x, block)
    amax = amax_reduce(find_amax(tiles, (2, 4)))
    scale, inverse = scale_of_codes(amax, dtype, bound)

    def round_tiles(tiles: jax.Array, inverse: jax.Array) -> jax.Array:
        inverse = _spread(inverse, tiles)
        if dtype == "float8_e4m3fn":
            return round_to_float8(tiles, inverse).astype(dtype)
        drawn = None if noise is None else _to_tiles(noise(), block)
        return round_to_codes(tiles, inverse, drawn).astype(dtype)

    return _Codes(tiles, call_apart(round_tiles, tiles, inverse), scale)


def _residual_term(
    main: _Codes, criterion: Criterion, theta: jax.Array
) -> tuple[_Codes, jax.Array]:
    """The second terms of the blocks that fall back, and the metric of all."""
    residual = _residual_tiles(main)
    metric = _metric(main.tiles, residual, main.scales, criterion)
    limit = jnp.where(theta >= 0.0, theta, 0.0)
    amax = jnp.where(metric > limit[:, None, None], find_amax(residual, (2, 4)), 0.0)
    scale, inverse = scale_of_codes(amax, "int8")
    codes = round_to_codes(residual, _spread(inverse, residual), None)
    return _Codes(residual, codes.astype(jnp.int8), scale), metric


def _residual_tiles(main: _Codes) -> jax.Array:
    """The tiles without what their codes stand for."""
    tiles, codes, scales = main
    return residual_of(tiles, codes.astype(jnp.float32), _spread(scales, tiles))


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """Computes only the metric of ``quantize``, float32 ``[B, R/r, C/c]``."""
    codes = _quantize(x.astype(jnp.float32), block)
    return _metric(codes.tiles, _residual_tiles(codes), codes.scales, criterion)


def matmul(
    lhs: Quantized | Unquantized,
    rhs: Quantized,
    groups: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies ``lhs [B, M, K]`` with ``rhs [B, N, K]``.

        out[m, n] = sum_k (s_lhs[m, k] * I[m, n, k] + s_res[m, k] * J[m, n, k])
                    * s_rhs[n, k]

    Here ``k`` counts blocks of K; ``I`` and ``J`` are the exact integer products of the
    codes of both terms of lhs with the codes of rhs.  Scaled block products are summed
    in float32 and rounded once to ``dtype``.

    Products of FP8 codes are summed in float32 inside a block of K, too, as in
    DeepSeek-V3 (arXiv:2412.19437), whose blocks are of 128: no tensor core sums more
    than a block.  The tensor cores of a GPU may keep fewer bits of these sums: on
    Hopper, about 14.

    A row of the output depends on that row of lhs and on rhs alone: sums do not depend
    on the number of rows, and what reads the output cannot change its rounding.

    Args:
      lhs: the left operand, which has one or two terms.  It is quantized to nearest
        first if it is ``Unquantized``.
      rhs: the right operand, of one term, with the same blocks along K.
      groups: int32 ``[B]``, the matrix of ``rhs [G, N, K]`` for each matrix of lhs, in
        ascending order.  The product of one whose group is not in ``[0, G)`` has no
        meaning; here it is 0.  None if each matrix has its own.
      dtype: the dtype of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.

    Raises:
      ValueError: the blocks of K differ, or rhs has two terms.
    """
    if isinstance(lhs, Unquantized):
        lhs = quantize_nearest(lhs)
    product_block(lhs, rhs)
    if groups is not None:
        return _matmul_in_groups(lhs, rhs, groups, dtype=jnp.dtype(dtype))
    return _matmul(lhs, rhs, dtype)


def quantize_nearest(x: Unquantized) -> Quantized:
    """Quantizes the lhs of a GEMM to nearest."""
    quantized, *_ = quantize(
        Matrix(x.values),
        jnp.zeros(x.values.shape[0], jnp.uint32),  # nearest rounding draws no noise
        x.theta,
        rowwise=Layout("nearest", x.block),
        colwise=None,
        criterion=x.criterion,
    )
    assert quantized is not None
    return quantized


def _matmul(lhs: Quantized, rhs: Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    (m, k), (n, _) = lhs.block, rhs.block
    terms, right = lhs.terms, rhs.main
    if right.scales.shape[2] == 1:
        # K has one scale.  If it is too long for exact int32 sums, it is split.
        depth = right.codes.shape[2]
        k = jax.core.min_dim(depth if k is None else k, MAX_INT32_K)
        pieces = -(-depth // k)
        *terms, right = (
            Term(
                term.codes,
                jnp.broadcast_to(term.scales, (*term.scales.shape[:2], pieces)),
            )
            for term in (*terms, right)
        )
    k = 1 if k is None else k  # None is left if there are no columns
    assert m is not None
    assert n is not None
    rows, columns = lhs.shape[1], rhs.shape[1]

    is_int8 = right.codes.dtype == jnp.int8
    acc = _zero_product(lhs.codes, rhs.codes)
    blocks = right.scales.shape[2]
    if blocks == 0:
        return acc.astype(dtype)
    *terms, right = (_pad_k(term, blocks * k) for term in (*terms, right))

    def add_block(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, acc = state
        codes, scales = _block_of_k(right, index, k)
        column_scale = _repeat(scales, n, columns)
        column_scale = lax.broadcast_in_dim(column_scale, acc.shape, (0, 2))
        for term in terms:
            lhs_codes, lhs_scales = _block_of_k(term, index, k)
            multiply = _int8_product if is_int8 else _float8_product
            product = multiply(lhs_codes, codes)
            row_scale = _repeat(lhs_scales, m, rows)
            scale = lax.broadcast_in_dim(row_scale, acc.shape, (0, 1)) * column_scale
            acc += scale_product(product, scale)
        return index + 1, acc

    # Not fori_loop, whose program has two counters.
    start = jnp.int32(0), acc
    _, acc = lax.while_loop(lambda s: s[0] < blocks, add_block, start)
    return round_to(acc, dtype)


def scale_product(product: jax.Array, scale: jax.Array) -> jax.Array:
    """``product * scale``, rounded whatever is added to it.

    The bounds change no value.  They keep XLA from contracting product and sum to an
    FMA, which it does in some programs.
    """
    limit = scale * 2.0**62  # above all products of codes
    return lax.clamp(-limit, product * scale, limit)


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds float32 to ``dtype``, whatever reads the result.

    XLA leaves out a conversion to 16 bits if it fuses what reads the result in float32
    (``xla_allow_excess_precision``).
    """
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype == jnp.float16:  # whose subnormal values would become 0
        subnormal = jnp.round(x * 2.0**24) * 2.0**-24
        rounded = jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)
    return rounded.astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _matmul_in_groups(
    lhs: Quantized, rhs: Quantized, groups: jax.Array, *, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Multiplies tiles one after the other: memory never holds a matrix per tile."""

    def multiply(tile: tuple[Quantized, jax.Array]) -> jax.Array:
        lhs, group = tile
        one = jax.tree.map(lambda x: x[None], lhs)
        matrix = jax.tree.map(lambda x: x[group][None], rhs)
        return _matmul(one, matrix, dtype)[0]

    def zeros(tile: tuple[Quantized, jax.Array]) -> jax.Array:
        # An empty sum over the operands varies over the mesh axes of their product.
        zero = jnp.sum(tile[0].scales[:0]) + jnp.sum(rhs.scales[:0])
        shape = tile[0].shape[0], rhs.shape[1]
        return jnp.broadcast_to(zero.astype(dtype), shape)

    def multiply_tile(tile: tuple[Quantized, jax.Array]) -> jax.Array:
        is_valid = (tile[1] >= 0) & (tile[1] < len(rhs.codes))
        return lax.cond(is_valid, multiply, zeros, tile)

    return lax.map(multiply_tile, (lhs, groups))


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def contract(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Contracts the rows of each tile, and sums the products of each group.

    The sums are in float32 and rounded once to ``dtype``.  A group without tiles gives
    zeros.

    Args:
      lhs: tiles ``[T, K, m]``, of one term.
      rhs: tiles ``[T, N, m]``, of one term.
      groups: int32 ``[T]``, each tile's group, in ascending order.  A tile whose group
        is not in ``[0, G)`` adds nothing.
      size: G.
      dtype: the dtype of the output.

    Returns:
      ``[G, K, N]`` in ``dtype``.
    """
    Tile = tuple[Quantized, Quantized, jax.Array]

    def add(sums: jax.Array, tile: Tile) -> jax.Array:
        lhs, rhs, group = tile
        lhs, rhs = jax.tree.map(lambda x: x[None], (lhs, rhs))
        return sums.at[group].add(_matmul(lhs, rhs, jnp.float32)[0])

    def add_tile(sums: jax.Array, tile: Tile) -> tuple[jax.Array, None]:
        is_valid = (tile[2] >= 0) & (tile[2] < size)
        return lax.cond(is_valid, add, lambda sums, _: sums, sums, tile), None

    # An empty sum over the operands varies over the mesh axes of their product.
    zero = jnp.sum(lhs.scales[:0]) + jnp.sum(rhs.scales[:0])
    zero += jnp.sum(groups[:0]).astype(jnp.float32)
    sums = jnp.broadcast_to(zero, (size, lhs.shape[1], rhs.shape[1]))
    return lax.scan(add_tile, sums, (lhs, rhs, groups))[0].astype(dtype)


_BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


def _int8_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The exact product of codes ``[B, M, k]`` and ``[B, N, k]``, as float32."""
    return lax.platform_dependent(
        lhs, rhs, cpu=_int_product, tpu=_int_product, default=_float_product
    )


def _int_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    product = lax.dot_general(lhs, rhs, _BATCHED_NT, preferred_element_type=jnp.int32)
    return product.astype(jnp.float32)


def _float_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The product of codes in float32, exact for INT8 and k up to 1040.

    On GPUs (jax 0.11.2 on an H200), XLA's INT8 products are wrong for some small
    operands that were padded and transposed.
    """
    return lax.dot_general(
        lhs.astype(jnp.float32),
        rhs.astype(jnp.float32),
        _BATCHED_NT,
        precision=lax.Precision.HIGHEST,
    )


def _float8_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The product of FP8 codes, which does not depend on how XLA orders sums.

    XLA's order depends on the number of rows.  Each operand is therefore the sum of
    three, of which every one has multiples of a power of two, up to 255 times as large.
    The product of two of them is exact in float32 for k up to 256.
    """
    pairs = itertools.product(_by_magnitude(lhs), _by_magnitude(rhs))
    return functools.reduce(lax.add, itertools.starmap(_float_product, pairs))


def _by_magnitude(codes: jax.Array) -> list[jax.Array]:
    """The E4M3 codes below 1/2, below 16, and from 16 on, with zeros elsewhere."""
    x = codes.astype(jnp.float32)
    size, zero = jnp.abs(x), jnp.zeros_like(x)
    small, large = size < 0.5, size >= 16.0
    return [
        jnp.where(small, x, zero),
        jnp.where(small | large, zero, x),
        jnp.where(large, x, zero),
    ]


def _zero_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Zeros ``[B, M, N]`` in float32.

    They are empty sums over the operands, so they are sharded like the products and
    vary over the same mesh axes.
    """
    rows, columns = (
        jnp.sum(codes[:, :, :0], axis=2, dtype=jnp.float32) for codes in (lhs, rhs)
    )
    return rows[:, :, None] + columns[:, None, :]


def _to_tiles(x: jax.Array, block: Block) -> jax.Array:
    """Pads ``[B, R, C]`` with zeros and splits it into ``[B, R/r, r, C/c, c]``."""
    batch, rows, columns = x.shape
    r, c = block[0] or rows or 1, block[1] or columns or 1
    x = jnp.pad(x, ((0, 0), (0, -rows % r), (0, -columns % c)))
    return x.reshape(batch, -(-rows // r), r, -(-columns // c), c)


def _spread(per_block: jax.Array, tiles: jax.Array) -> jax.Array:
    """One value per block, repeated to each element of the tiles.

    Arrays that broadcast implicitly would be three operations of XLA each.
    """
    return lax.broadcast_in_dim(per_block, tiles.shape, (0, 1, 3))


def _one_scale_per_row(x: Quantized) -> Quantized:
    """Broadcasts scales ``[B, 1, 1]`` or ``[B, R, 1]`` to ``[B, R, 1]``."""
    shape = (*x.shape[:2], x.scales.shape[2])
    scales = jnp.broadcast_to(x.scales, shape)
    return Quantized(Term(x.codes, scales), None, (1, None))


def scale_of_codes(
    amax: jax.Array, dtype: CodeDtype, bound: float = 127.0
) -> tuple[jax.Array, jax.Array]:
    """The scale of blocks and its inverse; only INT8 codes use ``bound``."""
    if dtype == "float8_e4m3fn":
        return scale_and_inverse_by_platform(amax, FLOAT8_LIMIT, FLOAT8_TINY)
    return scale_and_inverse_by_platform(amax, bound, TINY)


def round_to_codes(
    x: jax.Array, inverse: jax.Array, noise: jax.Array | None
) -> jax.Array:
    """Rounds ``x * inverse``, and noise, to codes in float32; 0 without an inverse."""
    limit = jnp.float32(127.0)
    v = lax.clamp(-limit, x * inverse, limit)
    v = jnp.where(inverse > 0.0, v, 0.0)
    return jnp.round(v if noise is None else v + noise)


def round_to_float8(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rounds ``x * inverse`` to values of E4M3, in float32; a NaN or an Inf to 0.

    Not by a conversion: on some devices XLA rounds twice, to float16 and then to FP8.
    """
    v = jnp.where(jnp.isfinite(x), x, 0.0) * inverse
    v = jnp.clip(v, -FLOAT8_LIMIT, FLOAT8_LIMIT)
    normal = lax.reduce_precision(v, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(v * 2.0**9) * 2.0**-9
    return jnp.where(jnp.abs(v) < 2.0**-6, subnormal, normal)


def residual_of(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """``x - scale * codes``, and 0 where the scale is not finite."""
    limit = scales * 127.0
    product = jnp.clip(scales * codes, -limit, limit)
    return jnp.where(jnp.isfinite(limit), x - product, 0.0)


def _metric(
    tiles: jax.Array, residual: jax.Array, scales: jax.Array, criterion: Criterion
) -> jax.Array:
    def sum_abs(tiles: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(tiles * _spread(shrinkage(scales), tiles)), axis=(2, 4))

    if criterion == "absmax":
        return metric_of(criterion, scales, amax=find_amax(tiles, (2, 4)))
    return metric_of(criterion, scales, sum_abs(residual), sum_abs(tiles))


def shrinkage(scales: jax.Array) -> jax.Array:
    """What the values of blocks with these scales are multiplied by before a sum."""
    return jnp.where(scales > LARGE, SHRINK, 1.0)


def metric_of(
    criterion: Criterion,
    scales: jax.Array,
    error: jax.Array | None = None,
    total: jax.Array | None = None,
    *,
    amax: jax.Array | None = None,
) -> jax.Array:
    """The metric of blocks from what is known of them; NaN without a finite scale.

    Args:
      criterion: which of the following it is of.
      scales: the scales of the blocks.
      error: for ``l1`` and ``l1_rel``, ``sum |x - scale * codes|`` times ``shrinkage``.
      total: for ``l1_rel``, ``sum |x|`` times ``shrinkage``.
      amax: for ``absmax``, ``max |x|``.
    """
    if criterion == "absmax":
        assert amax is not None
        return jnp.where(jnp.isfinite(scales), amax, jnp.nan)
    assert error is not None
    assert total is not None
    if criterion == "l1_rel":
        metric = error / jnp.where(total > 0.0, total, 1.0)
    else:
        metric = jnp.minimum(error / shrinkage(scales), jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(scales), metric, jnp.nan)


def _repeat(scales: jax.Array, side: int, size: int) -> jax.Array:
    """Repeats one scale per block to one per element along the last axis."""
    return jnp.repeat(scales, side, axis=-1)[..., :size]


def _pad_k(operand: Term, size: int) -> Term:
    """Pads the codes with zeros to ``size`` values along K."""
    missing = size - operand.codes.shape[2]
    return operand._replace(
        codes=jnp.pad(operand.codes, ((0, 0), (0, 0), (0, missing)))
    )


def _block_of_k(operand: Term, index: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The codes ``[B, R, k]`` and the scales ``[B, R/r]`` of one block of K."""
    codes, scales = (
        lax.dynamic_slice_in_dim(
            x, index * size, size, axis=2, allow_negative_indices=False
        )
        for x, size in ((operand.codes, k), (operand.scales, 1))
    )
    return codes, scales[:, :, 0]
