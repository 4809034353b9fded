"""The definitions of quantization and of the GEMM of codes, in plain ``jax.numpy``.

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
float32 (that of Mosaic, for outputs of 16 bits) reaches Inf or NaN from ``a = 2**118``.

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
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, NotRequired, TypedDict, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import rounding
from fbq_jax.kernels.scales import (
    FLOAT8_LIMIT,
    FLOAT8_TINY,
    find_amax,
    scale_and_inverse,
)

Block = tuple[int, int]
Criterion = Literal["absmax", "l1", "l1_rel"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
CodeDtype = Literal["int8", "float8_e4m3fn"]
CODE_DTYPES: tuple[CodeDtype, ...] = get_args(CodeDtype)

LARGE = 2.0**88  # The metrics of blocks with a larger scale sum their values times
SHRINK = 2.0**-32  # this power of two, lest a sum overflow.

MAX_INT32_K = 2**17  # The longest K of exact products: 127 * 127 * K fits into int32.


class Quantized(NamedTuple):
    """INT8 or FP8 codes of matrices with a scale per block.

    Attributes:
      codes: int8 or float8_e4m3fn ``[B, R, C]``.
      scales: float32 ``[B, ceil(R/r), ceil(C/c)]``.
      sums: the largest ``sum |codes|`` of a row of each block, or an upper bound of it,
        float32 of the shape of ``scales``; or None.  A GEMM bounds its partial sums by
        those of rhs.
    """

    codes: jax.Array
    scales: jax.Array
    sums: jax.Array | None = None


class Layouts(NamedTuple):
    """A quantized operand in one or both layouts; None for one not requested.

    INT8 tensor cores read both operands contiguously along the contraction.  An operand
    of two GEMMs may therefore be needed twice: ``rowwise``, as codes ``[B, R, C]``, and
    ``colwise``, as codes of the transpose ``[B, C, R]`` with transposed scales.
    """

    rowwise: Quantized | None
    colwise: Quantized | None


def _identity(x: jax.Array) -> jax.Array:
    return x


class AmaxReduce(NamedTuple):
    """Reduces ``max |x|`` over the shards of rows and of columns.

    Each function maps the maxima ``[B, N]`` of local vectors to those of the global
    vectors that they are parts of.  By default vectors are not sharded.
    """

    rowwise: Callable[[jax.Array], jax.Array] = _identity
    colwise: Callable[[jax.Array], jax.Array] = _identity


NO_AMAX_REDUCE = AmaxReduce()


class FallbackQuantized(NamedTuple):
    """An operand of two INT8 terms: ``main`` plus, in some blocks, ``residual``.

    Attributes:
      main: the rowwise layout.
      residual: a second term of the same shapes; None without a criterion.  Its scale
        is 0 in blocks that do not fall back.  Codes of blocks whose scale is 0 or NaN
        have no meaning: the reference has zeros there, and a kernel need not write
        them.
      metric: what the criterion compares with theta, float32 ``[B, R/r, C/c]``;
        ``[B, 0, 0]`` without a criterion.
      colwise: the colwise layout of ``main``, or None.
    """

    main: Quantized
    residual: Quantized | None
    metric: jax.Array
    colwise: Quantized | None


class QuantizeOptions(TypedDict):
    """The keyword arguments of ``quantize`` that an op on top of it passes on."""

    block: Block
    rowwise: rounding.Rounding | None
    colwise: rounding.Rounding | None
    global_offset: NotRequired[rounding.GlobalOffset | None]
    sums: NotRequired[tuple[str, ...]]
    dtype: NotRequired[CodeDtype]


class RowBlockOptions(QuantizeOptions):
    """The keyword arguments of ``quantize_row_blocks``."""

    colwise_in_blocks: NotRequired[bool]


class FallbackOptions(TypedDict):
    """The keyword arguments of ``quantize_fallback``."""

    block: Block
    criterion: Criterion | None
    colwise: rounding.Rounding | None
    global_offset: NotRequired[rounding.GlobalOffset | None]


def quantize(
    x: jax.Array,
    seeds: rounding.Seeds,
    *,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: Callable[[jax.Array], jax.Array] = _identity,
    bound: float = 127.0,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
) -> Layouts:
    """Quantizes matrices with one scale per block, in one or both layouts.

    Noise belongs to an element, so equal roundings give equal codes in both layouts.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      seeds: the seeds of stochastic rounding, of B matrices.
      block: rows and columns of a block.
      rowwise: the rounding of the rowwise codes, ``"nearest"`` or ``"stochastic"``, or
        None to omit this layout.
      colwise: the rounding of the colwise codes, or None to omit this layout.
      global_offset: the offset of this shard in the global matrix; selects its noise.
      amax_reduce: maps the maxima of local blocks ``[B, R/r, C/c]`` to the maxima of
        the global blocks that they are parts of.
      bound: the value that ``amax`` is scaled to in INT8; see ``quantize_vectors``.
      sums: the layouts, ``"rowwise"`` or ``"colwise"``, that get ``Quantized.sums``.
      dtype: the dtype of the codes.  FP8 codes are rounded to nearest.
    """
    check_float8(dtype, rowwise, colwise, sums)
    tiles = _to_tiles(x.astype(jnp.float32), block)

    def layout(mode: rounding.Rounding, sum_axis: int | None) -> Quantized:
        noise = None
        if mode == "stochastic":
            rows, columns = x.shape[1:]
            draw = jax.vmap(
                lambda seed: rounding.noise(seed, rows, columns, global_offset)
            )
            noise = _to_tiles(draw(rounding.fold_seeds(seeds)), block)
        codes, scales = _quantize_tiles(tiles, noise, amax_reduce, bound, dtype)
        quantized = _from_tiles(codes, scales, x.shape, dtype)
        if sum_axis is None:
            return quantized
        of_vectors = jnp.sum(jnp.abs(codes), axis=sum_axis, keepdims=True)
        return quantized._replace(sums=jnp.max(of_vectors, axis=(2, 4)))

    axes = 4 if "rowwise" in sums else None, 2 if "colwise" in sums else None
    transposed = None if colwise is None else layout(colwise, axes[1])
    return Layouts(
        None if rowwise is None else layout(rowwise, axes[0]),
        jax.tree.map(lambda y: y.mT, transposed),
    )


def check_float8(
    dtype: CodeDtype,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    sums: tuple[str, ...] = (),
) -> None:
    """Raises ValueError if FP8 codes do not support the options of a quantization."""
    if dtype == "float8_e4m3fn" and ("stochastic" in (rowwise, colwise) or sums):
        raise ValueError(
            "FP8 codes take nearest rounding and no sums; got "
            f"rowwise={rowwise!r}, colwise={colwise!r}, sums={sums!r}"
        )


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    bound: float = 127.0,
    per_tensor: bool = False,
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """Quantizes to INT8 with one scale per row (rowwise) or per column (colwise).

    A GEMM of such operands has no scale inside its contraction.  Both layouts draw the
    same noise, but their codes differ unless ``per_tensor``.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding.
      rowwise: the rounding of the rowwise codes ``[B, R, C]``, with scales
        ``[B, R, 1]``, or None to omit this layout.
      colwise: the rounding of the colwise codes ``[B, C, R]``, with scales
        ``[B, C, 1]``, or None to omit this layout.
      bound: the value that ``amax`` is scaled to, in place of 127.  With 127.5, values
        fill the interval that rounds to the last code; they are still clipped to 127.
      per_tensor: whether all rows and columns of a matrix share one scale.
      global_offset: the offset of this shard in the global matrix; selects its noise.
      amax_reduce: the reduction of maxima over shards of vectors.
    """
    _, height, width = x.shape
    matrix = height or 1, width or 1
    row, column = (matrix, matrix) if per_tensor else ((1, matrix[1]), (matrix[0], 1))
    run = functools.partial(
        quantize, x, seeds, global_offset=global_offset, bound=bound
    )
    main, _ = run(
        block=row, rowwise=rowwise, colwise=None, amax_reduce=amax_reduce.rowwise
    )
    _, transposed = run(
        block=column, rowwise=None, colwise=colwise, amax_reduce=amax_reduce.colwise
    )
    return Layouts(
        main and _one_scale_per_row(main),
        transposed and _one_scale_per_row(transposed),
    )


def quantize_row_blocks(
    x: jax.Array,
    seeds: rounding.Seeds,
    *,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    colwise_in_blocks: bool = False,
    global_offset: rounding.GlobalOffset | None = None,
    sums: tuple[str, ...] = (),
    dtype: CodeDtype = "int8",
) -> Layouts:
    """Quantizes with one scale per row or per column of a block.

    Each layout has its scales along the contraction of the GEMM that reads it: rowwise
    codes for ``1 x c`` values and colwise codes for ``r x 1`` values, as activations
    have in DeepSeek-V3 (arXiv:2412.19437).  Both layouts draw the same noise, but their
    codes differ.  Colwise codes may also be those of ``quantize``, with one scale per
    block, which a GEMM multiplies faster as its rhs.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      seeds: the seeds of stochastic rounding, of B matrices.
      block: ``(r, c)``, rows and columns of a block.
      rowwise: the rounding of the rowwise codes ``[B, R, C]``, with scales
        ``[B, R, ceil(C/c)]``, or None to omit this layout.
      colwise: the rounding of the colwise codes ``[B, C, R]``, with scales
        ``[B, C, ceil(R/r)]``, or None to omit this layout.
      colwise_in_blocks: whether the scales of colwise codes are
        ``[B, ceil(C/c), ceil(R/r)]``, one per block.
      global_offset: the offset of this shard in the global matrix; selects its noise.
      sums: ``("colwise",)`` if colwise codes in blocks get ``Quantized.sums``.
      dtype: the dtype of the codes.  FP8 codes are rounded to nearest.
    """
    run = functools.partial(
        quantize, x, seeds=seeds, global_offset=global_offset, dtype=dtype
    )
    columns = block[1] if colwise_in_blocks else 1
    of_columns = block[0], columns
    _, transposed = run(block=of_columns, rowwise=None, colwise=colwise, sums=sums)
    main, _ = run(block=(1, block[1]), rowwise=rowwise, colwise=None)
    return Layouts(main, transposed)


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: rounding.Seeds,
    *,
    block: Block,
    criterion: Criterion | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
) -> FallbackQuantized:
    """Quantizes to INT8 with a second INT8 term in blocks whose metric exceeds theta.

    This is the fallback quantization of arXiv:2503.08040.  Rowwise codes are rounded to
    nearest.  The residual ``x - scale * codes`` (float32) of a block that falls back is
    quantized in the same way, with its own scale.  The criterion selects the metric of
    a block:

    - ``absmax``: ``max |x|``;
    - ``l1``: ``sum |x - scale * codes|``, the error of plain INT8, or the largest
      float if that is smaller;
    - ``l1_rel``: that error divided by ``sum |x|``, and 0 for an all-zero block.

    A block with a NaN or an Inf has metric NaN and never falls back.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      theta: float32 ``[B]``, the thresholds, in units of the metric.  A threshold that
        is unset, negative or NaN, counts as 0 (see ``threshold_reference``).
      seeds: the seeds of stochastic colwise rounding, of B matrices.
      block: rows and columns of a block.
      criterion: ``"absmax"``, ``"l1"`` or ``"l1_rel"``; None for no fallback.
      colwise: the rounding of the colwise codes, or None to omit this layout.
      global_offset: the offset of this shard in the global matrix; selects its noise.
    """
    tiles = _to_tiles(x.astype(jnp.float32), block)
    codes, scales = _quantize_tiles(tiles, None)
    main = _from_tiles(codes, scales, x.shape)
    _, transposed = quantize(
        x,
        seeds,
        block=block,
        rowwise=None,
        colwise=colwise,
        global_offset=global_offset,
    )
    if criterion is None:
        no_metric = jnp.zeros((x.shape[0], 0, 0), jnp.float32)
        return FallbackQuantized(main, None, no_metric, transposed)
    residual = residual_of(tiles, codes, _spread(scales))
    metric = _metric(tiles, residual, scales, criterion)
    limit = jnp.where(theta >= 0.0, theta, 0.0)
    fallback = metric > limit[:, None, None]
    residual = jnp.where(_spread(fallback), residual, 0.0)
    second = _from_tiles(*_quantize_tiles(residual, None), x.shape)
    return FallbackQuantized(main, second, metric, transposed)


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """Computes only the metric of ``quantize_fallback``, float32 ``[B, R/r, C/c]``."""
    tiles = _to_tiles(x.astype(jnp.float32), block)
    codes, scales = _quantize_tiles(tiles, None)
    return _metric(tiles, residual_of(tiles, codes, _spread(scales)), scales, criterion)


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies ``lhs [B, M, K]``, plus its residual, with ``rhs [B, N, K]``.

        out[m, n] = sum_k (s_lhs[m, k] * I[m, n, k] + s_res[m, k] * J[m, n, k])
                    * s_rhs[n, k]

    Here ``k`` counts blocks of K; ``I`` and ``J`` are the exact integer products of the
    codes of lhs and of the residual with the codes of rhs.  Scaled block products are
    summed in float32 and rounded once to ``dtype``.

    Products of FP8 codes are summed in float32 inside a block of K, too, as in
    DeepSeek-V3 (arXiv:2412.19437), whose blocks are of 128: no tensor core sums more
    than a block.  The tensor cores of a GPU may keep fewer bits of these sums: on
    Hopper, about 14.

    Args:
      lhs: codes ``[B, M, K]``, scales ``[B, ceil(M/m), ceil(K/k)]``.
      residual: a second term of lhs with the same shapes, or None.
      rhs: codes ``[B, N, K]`` of the same dtype, scales ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``: lhs has blocks of ``m x k``, rhs of ``n x k``.
      dtype: the dtype of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    m, k, n = block_shape
    terms = [lhs] if residual is None else [lhs, residual]
    if lhs.scales.shape[2] == 1:
        # K has one scale.  If it is too long for exact int32 sums, it is split.
        k = jax.core.min_dim(k, MAX_INT32_K)
        pieces = -(-lhs.codes.shape[2] // k)
        *terms, rhs = (
            Quantized(
                term.codes,
                jnp.broadcast_to(term.scales, (*term.scales.shape[:2], pieces)),
            )
            for term in (*terms, rhs)
        )
    rows, columns = lhs.codes.shape[1], rhs.codes.shape[1]

    exact = _int_product if rhs.codes.dtype == jnp.int8 else _float_product

    def add_block(
        acc: jax.Array, operands: tuple[list[Quantized], Quantized]
    ) -> tuple[jax.Array, None]:
        terms, rhs = operands
        column_scale = _repeat(rhs.scales, n, columns)[:, None, :]
        for term in terms:
            product = lax.platform_dependent(
                term.codes, rhs.codes, cpu=exact, tpu=exact, default=_float_product
            )
            scale = _repeat(term.scales, m, rows)[:, :, None] * column_scale
            # The bounds change no value. They keep XLA from contracting product and sum
            # to an FMA, which it does in some programs: all round alike.
            limit = scale * 2.0**31
            acc += jnp.clip(product * scale, -limit, limit)
        return acc, None

    operands = ([_split_k(term, k) for term in terms], _split_k(rhs, k))
    acc = _zero_product(lhs.codes, rhs.codes)
    return lax.scan(add_block, acc, operands)[0].astype(dtype)


def quantize_matmul(
    x: jax.Array,
    theta: jax.Array,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    criterion: Criterion | None,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies ``x [B, M, K]``, quantized to nearest, with ``rhs [B, N, K]``.

    Args:
      x: bfloat16, float16 or float32 ``[B, M, K]``.
      theta: float32 ``[B]``, the thresholds of ``quantize_fallback``.
      rhs: codes int8 ``[B, N, K]``, scales ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``: x has blocks of ``m x k``, rhs of ``n x k``.
      criterion: as in ``quantize_fallback``.
      dtype: the dtype of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    lhs, residual, *_ = quantize_fallback(
        x,
        theta,
        jnp.zeros(x.shape[0], jnp.uint32),  # nearest rounding draws no noise
        block=block_shape[:2],
        criterion=criterion,
        colwise=None,
    )
    return matmul(lhs, residual, rhs, block_shape=block_shape, dtype=dtype)


_BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


def _int_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The exact product of codes ``[B, M, k]`` and ``[B, N, k]``, as float32."""
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
    r, c = block
    x = jnp.pad(x, ((0, 0), (0, -rows % r), (0, -columns % c)))
    return x.reshape(batch, -(-rows // r), r, -(-columns // c), c)


def _from_tiles(
    codes: jax.Array,
    scales: jax.Array,
    shape: tuple[int, ...],
    dtype: CodeDtype = "int8",
) -> Quantized:
    """The operand of ``shape`` whose tiles have these codes and scales."""
    batch, i, r, j, c = codes.shape
    codes = codes.reshape(batch, i * r, j * c)[:, : shape[1], : shape[2]]
    return Quantized(codes.astype(dtype), scales)


def _spread(per_block: jax.Array) -> jax.Array:
    """Adds axes, so that one value per block broadcasts against tiles."""
    return per_block[:, :, None, :, None]


def _one_scale_per_row(x: Quantized) -> Quantized:
    """Broadcasts scales ``[B, 1, 1]`` or ``[B, R, 1]`` to ``[B, R, 1]``."""
    shape = (*x.codes.shape[:2], x.scales.shape[2])
    return Quantized(x.codes, jnp.broadcast_to(x.scales, shape))


def _quantize_tiles(
    tiles: jax.Array,
    noise: jax.Array | None,
    amax_reduce: Callable[[jax.Array], jax.Array] = _identity,
    bound: float = 127.0,
    dtype: CodeDtype = "int8",
) -> tuple[jax.Array, jax.Array]:
    """Returns codes, as float32 tiles, and scales ``[B, R/r, C/c]``."""
    amax = amax_reduce(find_amax(tiles, (2, 4)))
    scale, inverse = scale_of_codes(amax, dtype, bound)
    if dtype == "float8_e4m3fn":
        return round_to_float8(tiles, _spread(inverse)), scale
    return round_to_codes(tiles, _spread(inverse), noise), scale


def scale_of_codes(
    amax: jax.Array, dtype: CodeDtype, bound: float = 127.0
) -> tuple[jax.Array, jax.Array]:
    """The scale of blocks and its inverse; ``bound`` is that of INT8 codes."""
    if dtype == "float8_e4m3fn":
        return scale_and_inverse(amax, FLOAT8_LIMIT, FLOAT8_TINY)
    return scale_and_inverse(amax, bound)


def round_to_codes(
    x: jax.Array, inverse: jax.Array, noise: jax.Array | None
) -> jax.Array:
    """Rounds ``x * inverse``, and noise, to codes in float32; 0 without an inverse."""
    v = jnp.clip(x * inverse, -127.0, 127.0)
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
        return jnp.sum(jnp.abs(tiles * _spread(shrinkage(scales))), axis=(2, 4))

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


def dequantize(x: Quantized, block: Block) -> jax.Array:
    """Multiplies codes ``[..., R, C]`` with the scales of their blocks, in float32."""
    return x.codes.astype(jnp.float32) * repeat_blocks(x.scales, block, x.codes.shape)


def repeat_blocks(
    per_block: jax.Array, block: Block, shape: Sequence[int]
) -> jax.Array:
    """Repeats one value per block to one per element of ``shape``, ``[..., R, C]``."""
    (r, c), (rows, columns) = block, shape[-2:]
    repeated = jnp.repeat(jnp.repeat(per_block, r, axis=-2), c, axis=-1)
    return repeated[..., :rows, :columns]


def _repeat(scales: jax.Array, side: int, size: int) -> jax.Array:
    """Repeats one scale per block to one per element along the last axis."""
    return jnp.repeat(scales, side, axis=-1)[..., :size]


def _split_k(operand: Quantized, k: int) -> Quantized:
    """Moves blocks of K first: codes ``[K/k, B, R, k]``, scales ``[K/k, B, R/r]``."""
    codes, scales, _ = operand
    batch, rows, size = codes.shape
    blocks = scales.shape[2]
    codes = jnp.pad(codes, ((0, 0), (0, 0), (0, blocks * k - size)))
    codes = codes.reshape(batch, rows, blocks, k)
    return Quantized(codes.transpose(2, 0, 1, 3), scales.transpose(2, 0, 1))
