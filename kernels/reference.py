"""The ops in plain ``jax.numpy``: their definition, the oracle and the CPU path.

An operand is a stack of matrices ``[B, R, C]``, cut into blocks of ``block = (r, c)``
elements; blocks at the lower and right edges may be partial.  Per block

    amax  = max |x|
    scale = amax / 127                                  (float32)
    v     = clip(x * (127 / amax), -127, 127)           (float32)
    codes = round_half_even(v + noise)                  (int8, never -128)

Every other implementation agrees with these codes and scales bit for bit, on every
device, which shapes the code.  A float product that is added to something is clipped
first, because a compiler may otherwise fuse the two into one rounding.  The quotients
are rounded as IEEE 754 asks, by a division of their own (``scales``), because XLA's is
not.

Two kinds of block are special.  One whose ``amax`` is below ``scales.TINY`` (its scale
or its reciprocal would leave the normal floats) counts as all zero: scale 0, codes 0.
One that holds a NaN or an Inf has scale NaN, so that everything computed from it is
NaN: quantization never hides a diverged run.  Its codes mean nothing (here zeros).
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import rounding
from fbq_jax.kernels.scales import find_amax, scale_and_inverse

Block = tuple[int, int]
Criterion = Literal["absmax", "l1", "l1_rel"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)

MAX_INT32_K = 2**17  # elements of K: 127 * 127 * MAX_INT32_K fits into int32


class Quantized(NamedTuple):
    """Codes int8 ``[B, R, C]`` and scales float32 ``[B, ceil(R/r), ceil(C/c)]``."""

    codes: jax.Array
    scales: jax.Array


class Layouts(NamedTuple):
    """An operand's codes in the layouts asked for; None for the others.

    A tensor core takes both operands contiguous along the contraction, so an operand
    of two GEMMs may be needed twice: by ``rows``, as it lies, and by ``columns``, as
    its transpose ``[B, C, R]`` with transposed scales.
    """

    rowwise: Quantized | None
    colwise: Quantized | None


def _identity(x: jax.Array) -> jax.Array:
    return x


class AmaxReduce(NamedTuple):
    """Makes ``max |x|`` of parts of vectors that of whole ones, by rows and columns."""

    rowwise: Callable[[jax.Array], jax.Array]
    colwise: Callable[[jax.Array], jax.Array]


NO_AMAX_REDUCE = AmaxReduce(_identity, _identity)
"""Of vectors that are whole."""


class FallbackQuantized(NamedTuple):
    """A quantized operand, its residual, and what decides where that is used.

    ``residual`` has scale 0 in the blocks that do not fall back; its codes there mean
    nothing, like those of a block whose scale is NaN (an implementation need not write
    them; the reference leaves zeros).
    ``metric`` is the criterion's value, float32, one a block.  ``columns`` is as in
    ``Layouts``, of the operand without its residual.
    """

    main: Quantized
    residual: Quantized
    metric: jax.Array
    colwise: Quantized | None


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
    amax_reduce: Callable[[jax.Array], jax.Array] = _identity,
) -> Layouts:
    """Quantizes matrices to INT8 with one scale a block, in one or both layouts.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      seeds: uint32 ``[B]``, of the noise; not read by nearest rounding.
      block: rows and columns of a block.
      rowwise: the rounding, ``"nearest"`` or ``"stochastic"``, of the rowwise codes;
        None for no such codes.
      colwise: likewise, of the colwise codes.  Noise belongs to an element, so equal
        roundings give equal codes.
      global_offset: where the matrices lie in larger ones, which the noise is that of.
      amax_reduce: makes the maxima of blocks ``[B, R/r, C/c]`` those of larger blocks.
    """
    return _layouts(x, seeds, block, rowwise, colwise, global_offset, amax_reduce)


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
    """Quantizes vector-wise: one scale a row by rows, one a column by columns.

    So that a GEMM has no scale inside its contraction.  The two layouts hold different
    codes, with the same noise, unless all of a matrix shares one scale.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      seeds: uint32 ``[B]``, of the noise; not read by nearest rounding.
      rowwise: the rounding of the rowwise codes, ``[B, R, C]`` with scales
        ``[B, R, 1]``; None for no such codes.
      colwise: likewise, of the colwise codes, ``[B, C, R]`` with scales ``[B, C, 1]``.
      bound: what ``amax`` is scaled to: 127, the last code, or 127.5, the edge of what
        rounds to it.  ``v`` is clipped to the last code all the same.
      per_tensor: whether the scales of a matrix are all that of its own ``amax``.
      global_offset: where the matrices lie in larger ones, which the noise is that of.
      amax_reduce: makes their maxima those of the larger ones.
    """
    _, height, width = x.shape
    row, column = (1, max(1, width)), (max(1, height), 1)
    if per_tensor:
        row = column = (max(1, height), max(1, width))
    layouts = functools.partial(
        _layouts, x, seeds, global_offset=global_offset, bound=bound
    )
    by_rows = layouts(row, rowwise, None, amax_reduce=amax_reduce.rowwise).rowwise
    by_columns = layouts(column, None, colwise, amax_reduce=amax_reduce.colwise).colwise
    return Layouts(
        by_rows and _one_scale_a_row(by_rows),
        by_columns and _one_scale_a_row(by_columns),
    )


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None = None,
) -> FallbackQuantized:
    """Quantizes to INT8, nearest, with a second term where the metric exceeds theta.

    The residual ``x - scale * codes`` (float32) is quantized like an operand of its
    own, with its own scales.  The metric of a block is, by ``criterion``,

    - ``absmax``: ``max |x|``;
    - ``l1``: ``sum |x - scale * codes|``, the error of plain INT8;
    - ``l1_rel``: that error divided by ``sum |x|`` (0 for an all-zero block).

    It is NaN for a block with a NaN or an Inf, which never falls back.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      theta: float32 ``[B]``, thresholds in the units of the metric.
      seeds: uint32 ``[B]``, of the noise; read by stochastic ``colwise`` only.
      block: rows and columns of a block.
      criterion: which metric.
      colwise: the rounding of the codes by columns; None for no such codes.
      global_offset: where the matrices lie in larger ones, which the noise is that of.
    """
    tiles = _to_tiles(x.astype(jnp.float32), block)
    codes, scales = _quantize_tiles(tiles, None)
    residual = _residual(tiles, codes, scales)
    metric = _metric(tiles, residual, scales, criterion)
    fallback = metric > theta[:, None, None]
    residual = jnp.where(_spread(fallback), residual, 0.0)
    residual_codes, residual_scales = _quantize_tiles(residual, None)
    return FallbackQuantized(
        Quantized(_from_tiles(codes, x.shape).astype(jnp.int8), scales),
        Quantized(
            _from_tiles(residual_codes, x.shape).astype(jnp.int8), residual_scales
        ),
        metric,
        _layouts(x, seeds, block, None, colwise, global_offset).colwise,
    )


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """The metric of ``quantize_fallback`` alone: float32, one a block."""
    tiles = _to_tiles(x.astype(jnp.float32), block)
    codes, scales = _quantize_tiles(tiles, None)
    return _metric(tiles, _residual(tiles, codes, scales), scales, criterion)


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies ``lhs [B, M, K]`` (plus its residual) with ``rhs [B, N, K]``.

        out[m, n] = sum_k (s_lhs[m, k] * I[m, n, k] + s_res[m, k] * J[m, n, k])
                    * s_rhs[n, k]

    with ``k`` over K blocks; ``I`` and ``J`` are exact integer products of lhs' and the
    residual's codes with those of rhs.  Scaled block products are summed in float32 and
    rounded once to the output's dtype.  Both operands are contiguous along K, as INT8
    tensor cores need them.

    Args:
      lhs: codes ``[B, M, K]``, scales ``[B, ceil(M/m), ceil(K/k)]``.
      residual: a second term of lhs, of the same shapes, or None.
      rhs: codes ``[B, N, K]``, scales ``[B, ceil(N/n), ceil(K/k)]``.
      block_shape: ``(m, k, n)``, the sides of a block.
      dtype: of the output.

    Returns:
      ``[B, M, N]`` in ``dtype``.
    """
    m, k, n = block_shape
    if k > MAX_INT32_K and lhs.scales.shape[2] == 1:
        # One scale for all of K, which is cut so that int32 holds the products.
        pieces = -(-lhs.codes.shape[2] // MAX_INT32_K)
        lhs, rhs = (
            Quantized(codes, jnp.repeat(scales, pieces, axis=2))
            for codes, scales in (lhs, rhs)
        )
        if residual is not None:
            scales = jnp.repeat(residual.scales, pieces, axis=2)
            residual = Quantized(residual.codes, scales)
        k = MAX_INT32_K
    terms = [lhs] if residual is None else [lhs, residual]
    rows, columns = lhs.codes.shape[1], rhs.codes.shape[1]

    def add_block(
        acc: jax.Array, operands: tuple[list[Quantized], Quantized]
    ) -> tuple[jax.Array, None]:
        terms, rhs = operands
        column_scale = _repeat(rhs.scales, n, columns)[:, None, :]
        for term in terms:
            product = lax.platform_dependent(
                term.codes, rhs.codes, cpu=_int_product, default=_float_product
            )
            row_scale = _repeat(term.scales, m, rows)[:, :, None]
            acc += product * (row_scale * column_scale)
        return acc, None

    # Zeros, as empty sums over the operands: so they vary over the axes of a mesh, and
    # are sharded, as what will be added to them.
    row_zeros, column_zeros = (
        jnp.sum(codes[:, :, :0], axis=2, dtype=jnp.float32)
        for codes in (lhs.codes, rhs.codes)
    )
    acc = row_zeros[:, :, None] + column_zeros[:, None, :]
    operands = ([_split_k(term, k) for term in terms], _split_k(rhs, k))
    return lax.scan(add_block, acc, operands)[0].astype(dtype)


_BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


def _int_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Codes ``[B, M, k]`` times ``[B, N, k]``, exact: float32 ``[B, M, N]``."""
    product = lax.dot_general(lhs, rhs, _BATCHED_NT, preferred_element_type=jnp.int32)
    return product.astype(jnp.float32)


def _float_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The same, exact up to 1040 elements of K: float32 holds 127 * 127 * 1040.

    XLA for GPUs (jax 0.11.2 on an H200) gives wrong INT8 products for some small
    operands that are padded and transposed first.
    """
    return lax.dot_general(
        lhs.astype(jnp.float32),
        rhs.astype(jnp.float32),
        _BATCHED_NT,
        precision=lax.Precision.HIGHEST,
    )


def _to_tiles(x: jax.Array, block: Block) -> jax.Array:
    """Zero-pads ``[B, R, C]`` to whole blocks: ``[B, R/r, r, C/c, c]``."""
    batch, rows, columns = x.shape
    r, c = block
    x = jnp.pad(x, ((0, 0), (0, -rows % r), (0, -columns % c)))
    return x.reshape(batch, -(-rows // r), r, -(-columns // c), c)


def _from_tiles(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    batch, i, r, j, c = tiles.shape
    return tiles.reshape(batch, i * r, j * c)[:, : shape[1], : shape[2]]


def _spread(per_block: jax.Array) -> jax.Array:
    """Makes one value a block broadcast against tiles."""
    return per_block[:, :, None, :, None]


def _layouts(
    x: jax.Array,
    seeds: jax.Array,
    block: Block,
    rowwise: rounding.Rounding | None,
    colwise: rounding.Rounding | None,
    global_offset: rounding.GlobalOffset | None,
    amax_reduce: Callable[[jax.Array], jax.Array] = _identity,
    bound: float = 127.0,
) -> Layouts:
    tiles = _to_tiles(x.astype(jnp.float32), block)

    def layout(mode: rounding.Rounding) -> Quantized:
        noise = None
        if mode == "stochastic":
            draw = functools.partial(
                rounding.noise,
                rows=x.shape[1],
                columns=x.shape[2],
                global_offset=global_offset,
            )
            noise = _to_tiles(jax.vmap(draw)(seeds), block)
        codes, scales = _quantize_tiles(tiles, noise, amax_reduce, bound)
        return Quantized(_from_tiles(codes, x.shape).astype(jnp.int8), scales)

    return Layouts(
        None if rowwise is None else layout(rowwise),
        None if colwise is None else _mT(layout(colwise)),
    )


def _one_scale_a_row(x: Quantized) -> Quantized:
    """With the scale of a matrix, or else its rows' own, written for each row."""
    shape = (*x.codes.shape[:2], x.scales.shape[2])
    return Quantized(x.codes, jnp.broadcast_to(x.scales, shape))


def _mT(x: Quantized) -> Quantized:  # noqa: N802 (NumPy's name)
    return Quantized(x.codes.mT, x.scales.mT)


def _quantize_tiles(
    tiles: jax.Array,
    noise: jax.Array | None,
    amax_reduce: Callable[[jax.Array], jax.Array] = _identity,
    bound: float = 127.0,
) -> tuple[jax.Array, jax.Array]:
    """Codes (as float32 tiles) and scales of tiles."""
    scale, inverse = scale_and_inverse(amax_reduce(find_amax(tiles, (2, 4))), bound)
    inverse = _spread(inverse)
    v = jnp.clip(tiles * inverse, -127.0, 127.0)
    v = jnp.where(inverse > 0.0, v, 0.0)
    return jnp.round(v if noise is None else v + noise), scale


def _residual(tiles: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """What INT8 lost: ``x - scale * codes``, 0 in a block without a finite scale."""
    limit = _spread(scales * 127.0)
    product = jnp.clip(_spread(scales) * codes, -limit, limit)
    return jnp.where(jnp.isfinite(limit), tiles - product, 0.0)


def _metric(
    tiles: jax.Array, residual: jax.Array, scales: jax.Array, criterion: Criterion
) -> jax.Array:
    if criterion == "absmax":
        metric = find_amax(tiles, (2, 4))
    else:
        metric = jnp.sum(jnp.abs(residual), axis=(2, 4))
        if criterion == "l1_rel":
            total = jnp.sum(jnp.abs(tiles), axis=(2, 4))
            metric = metric / jnp.where(total > 0.0, total, 1.0)
    return jnp.where(jnp.isfinite(scales), metric, jnp.nan)


def dequantize(x: Quantized, block: Block) -> jax.Array:
    """The values that codes ``[..., R, C]`` with a scale a block stand for, float32."""
    (r, c), (rows, columns) = block, x.codes.shape[-2:]
    scales = jnp.repeat(jnp.repeat(x.scales, r, axis=-2), c, axis=-1)
    return x.codes.astype(jnp.float32) * scales[..., :rows, :columns]


def _repeat(scales: jax.Array, side: int, size: int) -> jax.Array:
    """One scale a block to one an element, along the last axis."""
    return jnp.repeat(scales, side, axis=-1)[..., :size]


def _split_k(operand: Quantized, k: int) -> Quantized:
    """Moves K blocks first: codes ``[K/k, B, R, k]``, scales ``[K/k, B, R/r]``."""
    codes, scales = operand
    batch, rows, size = codes.shape
    codes = jnp.pad(codes, ((0, 0), (0, 0), (0, -size % k)))
    codes = codes.reshape(batch, rows, scales.shape[2], k)
    return Quantized(codes.transpose(2, 0, 1, 3), scales.transpose(2, 0, 1))
