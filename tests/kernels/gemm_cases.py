"""Checks that every implementation of ``reference.matmul`` must pass.

Each check takes the implementation as its argument ``matmul``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels.quantized import Block, Quantized, Term
from tests import oracle


class Case(NamedTuple):
    """One GEMM.

    Attributes:
      shape: ``(B, M, K, N)``.
      blocks: ``(m, k, n)``, the block shape.
      fallback: fraction of lhs' blocks with a residual; None for no residual operand.
      dtype: dtype of the codes.
    """

    shape: tuple[int, int, int, int]
    blocks: tuple[int, int, int]
    fallback: float | None
    dtype: str = "int8"


# The GEMM in Mosaic has no residual with scales of rows.
ROWS_AND_FALLBACK = Case((1, 150, 400, 140), (1, 128, 128), 0.3)
CASES = {
    "aligned": Case((1, 128, 256, 256), (128, 128, 128), None),
    "aligned, fallback": Case((2, 128, 512, 128), (128, 128, 128), 0.3),
    "unaligned": Case((2, 70, 304, 190), (128, 128, 128), None),
    "unaligned, fallback": Case((2, 200, 333, 135), (128, 128, 128), 0.5),
    "many tiles": Case((1, 700, 64, 300), (128, 64, 128), 0.5),
    "few rows, fallback": Case((2, 8, 700, 300), (128, 128, 128), 0.3),
    "few rows of many K blocks": Case((1, 5, 2200, 100), (128, 128, 128), 0.3),
    "one element": Case((3, 1, 1, 1), (128, 128, 128), 1.0),
    "no block falls back": Case((1, 32, 320, 32), (32, 32, 32), 0.0),
    "every block falls back": Case((1, 130, 260, 64), (64, 64, 64), 1.0),
    "32x32x32 blocks": Case((2, 100, 100, 80), (32, 32, 32), 0.3),
    "256x256x256 blocks": Case((1, 300, 560, 270), (256, 256, 256), 0.3),
    "32x128x256 blocks": Case((1, 150, 400, 140), (32, 128, 256), 0.3),
    "64x256x32 blocks": Case((1, 140, 600, 100), (64, 256, 32), 0.3),
    "256x64x64 blocks": Case((1, 260, 150, 200), (256, 64, 64), 0.3),
    "scales of rows": Case((2, 200, 333, 190), (1, 128, 128), None),
    "scales of rows and columns": Case((2, 130, 400, 300), (1, 128, 1), None),
    "scales of columns": Case((1, 150, 260, 100), (64, 64, 1), None),
    "scales of few rows": Case((2, 20, 300, 200), (1, 128, 128), None),
    "128x32x256 blocks": Case((1, 90, 150, 280), (128, 32, 256), None),
}

_FLOAT8 = None, "float8_e4m3fn"
FLOAT8_CASES = {
    "scales of rows": Case((2, 200, 333, 190), (1, 128, 128), *_FLOAT8),
    "scales of rows and columns": Case((1, 130, 400, 300), (1, 128, 1), *_FLOAT8),
    "blocks": Case((1, 150, 256, 140), (128, 128, 128), *_FLOAT8),
    "one element": Case((3, 1, 1, 1), (1, 128, 128), *_FLOAT8),
}
FLOAT8_SMALL_CASES = {"blocks of 32": Case((1, 70, 100, 80), (1, 32, 32), *_FLOAT8)}


def random_operand(
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    block: Block,
    fallback: float | None = None,
    dtype: str = "int8",
) -> Quantized:
    """Random codes and positive scales.

    Residuals that are not used have scale 0 and random codes.
    """

    def term(used: float) -> Term:
        codes = rng.integers(-127, 128, shape).astype(np.int8)
        if dtype != "int8":  # the bits of any finite codes
            codes = (codes % 127 | codes & -128).astype(np.int8).view(dtype)
        blocks = [-(-n // side) for n, side in zip(shape[1:], block, strict=True)]
        of_blocks = shape[0], *blocks
        scales = rng.uniform(0.5, 2.0, of_blocks) * (rng.random(of_blocks) < used)
        return jax.device_put(Term(codes, scales.astype(np.float32)))

    return Quantized(term(1.0), None if fallback is None else term(fallback), block)


def operands(case: Case, seed: int = 0) -> tuple[Quantized, Quantized]:
    """Random operands of a case."""
    rng = np.random.default_rng(seed)
    (batch, M, K, N), (m, k, n), fallback, dtype = case
    lhs = random_operand(rng, (batch, M, K), (m, k), fallback, dtype)
    return lhs, random_operand(rng, (batch, N, K), (n, k), dtype=dtype)


def shapes(
    shape: tuple[int, int, int],
    block: Block,
    codes: str = "int8",
    *,
    fallback: bool = False,
) -> Quantized:
    """The shapes and dtypes of an operand."""
    blocks = [-(-n // side) for n, side in zip(shape[1:], block, strict=True)]
    scales = jax.ShapeDtypeStruct((shape[0], *blocks), jnp.float32)
    term = Term(jax.ShapeDtypeStruct(shape, codes), scales)
    return Quantized(term, term if fallback else None, block)


def with_scales(operand: Quantized, scales, term: str = "main") -> Quantized:
    """The operand with other scales of a term, a function of those it has."""
    old = getattr(operand, term)
    return dataclasses.replace(
        operand, **{term: old._replace(scales=scales(old.scales))}
    )


def values(operand: Quantized) -> np.ndarray:
    """The values in float64."""
    terms = [oracle.dequantize_stack(term, operand.block) for term in operand.terms]
    return sum(terms[1:], terms[0])


def exact(lhs: Quantized, rhs: Quantized) -> np.ndarray:
    """The product in float64."""
    with np.errstate(invalid="ignore"):
        return values(lhs) @ values(rhs).mT


def check_against_float64(matmul, case: Case, tolerance: float = 1e-5) -> None:
    args = operands(case)
    y = matmul(*args, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    assert oracle.relative(y, exact(*args)) <= tolerance


def check_outlier_scale(matmul) -> None:
    """Rows with codes 0 in the block of an outlier lose no accuracy to its scale."""
    lhs, rhs = operands(Case((1, 128, 1280, 128), (128, 128, 128), None))
    codes = lhs.codes.at[:, :, 128:256].set(0).at[:, 5, 200].set(127)
    scales = lhs.scales.at[0, 0, 1].mul(10_000.0)
    lhs = Quantized(Term(codes, scales), None, lhs.block)
    y = np.asarray(matmul(lhs, rhs, dtype=jnp.float32))[0]
    expected = exact(lhs, rhs)[0]
    others = np.arange(128) != 5
    assert oracle.relative(y[others], expected[others]) <= 1e-6


def check_largest_sums(
    matmul, sign: int, sums: float | None = None, zero_columns: int = 0
) -> None:
    """The largest products there are, whose running sums must not leave their range.

    ``sums`` are those of rhs: an upper bound, or NaN, which bounds nothing.  rhs begins
    with blocks of columns of zeros.
    """
    depth, columns = 8 * 128, 128 * (zero_columns + 1)
    codes = jnp.full((1, 128, depth), 127, jnp.int8)
    scales = jnp.full((1, 1, depth // 128), 2.0**-14)
    rhs_codes = jnp.pad(codes, ((0, 0), (columns - 128, 0), (0, 0)))
    rhs_scales = jnp.ones((1, columns // 128, depth // 128))
    bounds = None if sums is None else jnp.full_like(rhs_scales, sums)
    lhs = Quantized(Term(sign * codes, scales), None, (128, 128))
    rhs = Quantized(Term(rhs_codes, rhs_scales, bounds), None, (128, 128))
    y = matmul(lhs, rhs, dtype=jnp.bfloat16)
    largest = jnp.full((1, 128, 128), sign * 127.0**2 * 2.0**-14 * depth, y.dtype)
    expected = jnp.pad(largest, ((0, 0), (0, 0), (columns - 128, 0)))
    np.testing.assert_array_equal(y, expected)


def check_outlier_with_residual(matmul) -> None:
    """Rows that share the block of an outlier keep the accuracy of two terms."""
    rng = np.random.default_rng(0)
    codes = np.clip(np.rint(30 * rng.standard_normal((3, 1, 128, 1280))), -127, 127)
    main, term, rhs = (jnp.asarray(x, jnp.int8) for x in codes)
    main = main.at[:, :, 128:256].set(0).at[:, 5, 200].set(127)
    ones = jnp.ones((1, 1, 10))
    first = Term(main, ones.at[0, 0, 1].set(2000.0))
    residual = Term(term, jnp.zeros_like(ones).at[0, 0, 1].set(8.0))
    lhs = Quantized(first, residual, (128, 128))
    rhs = Quantized(Term(rhs, ones), None, (128, 128))
    y = matmul(lhs, rhs, dtype=jnp.bfloat16)
    others = np.arange(128) != 5
    expected = exact(lhs, rhs)[0, others]
    # Rounding to bfloat16 alone loses 1.7e-3.
    assert oracle.relative(np.asarray(y, np.float64)[0, others], expected) <= 2e-3


def check_rounds_once(matmul, dtype, name: str = "unaligned, fallback") -> None:
    lhs, rhs = operands(CASES[name])
    y = matmul(lhs, rhs, dtype=dtype)
    wide = matmul(lhs, rhs, dtype=jnp.float32)
    assert y.dtype == dtype
    # Sums in another order may round to the other neighbour, which is rare; Inf is a
    # neighbour of the largest value. Where terms cancel, they may differ by one or two
    # products of the smallest codes.
    largest = float(jnp.finfo(dtype).max)
    rounded = np.asarray(wide.astype(dtype), np.float64).clip(-largest, largest)
    y = np.asarray(y, np.float64).clip(-largest, largest)
    atol = 2.0 * float(jnp.max(lhs.scales) * jnp.max(rhs.scales))
    rtol = 1.01 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y, rounded, rtol=rtol, atol=atol)
    assert np.mean(y == rounded) > (0.99 if dtype == jnp.bfloat16 else 0.95)


def check_nan_scales(matmul, block_shape: tuple[int, int, int]) -> None:
    """A NaN scale shows in every output that depends on it, and in no other."""
    m, k, n = block_shape
    shape = (1, 2 * m + 44, 2 * k + 44, 2 * n + 44)
    lhs, rhs = operands(Case(shape, block_shape, 0.3))
    lhs = with_scales(lhs, lambda s: s.at[0, 0, 0].set(jnp.nan))
    lhs = with_scales(lhs, lambda s: s.at[0, 1, -1].set(jnp.nan), "residual")
    rhs = with_scales(rhs, lambda s: s.at[0, -1, 0].set(jnp.nan))
    y = matmul(lhs, rhs, dtype=jnp.float32)
    expected = np.isnan(exact(lhs, rhs))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.isnan(y), expected)


def check_extreme_scales(matmul, dtype) -> None:
    """Products of scales far below and above float32's range, and just inside it."""
    K = 512
    lhs, rhs = operands(Case((1, 128, K, 128), (128, 128, 128), None))
    sizes = [
        Quantized(x.main._replace(codes=jnp.abs(x.codes)), None, x.block)
        for x in (lhs, rhs)
    ]
    for exponent in (-146, -134, -124, 0, 101, 110, 130):
        half = exponent // 2
        x = with_scales(lhs, lambda s, e=half: s * 2.0**e)
        w = with_scales(rhs, lambda s, e=exponent - half: s * 2.0**e)
        y = np.asarray(matmul(x, w, dtype=dtype), np.float64)
        expected = exact(x, w)
        bound = 2.0 ** (exponent - 22) * exact(*sizes)
        if dtype != jnp.float32:  # sums may be running ones
            bound += np.abs(expected) * float(jnp.finfo(dtype).eps)
            bound += 4.0 * 2.0**exponent
        if exponent < -124:  # a device may take a subnormal product of scales for 0
            bound += K * 127.0**2 * 2.0**-126
        finite = np.isfinite(y)
        assert np.all((np.abs(y - expected) <= bound)[finite])
        assert finite.all() or exponent > 101
        assert not finite.any() or exponent < 130


def check_extreme_codes(matmul, k: int, K: int = 140_032) -> None:
    """The largest and the smallest sums, by default over a K that overflows int32."""
    codes = jnp.full((1, 2, K), 127, jnp.int8)
    scales = jnp.full((1, 1, -(-K // k)), 2.0**-14, jnp.float32)
    both_signs = jnp.asarray([[[1], [-1]]], jnp.int8) * codes
    lhs, rhs = (Quantized(Term(x, scales), None, (128, k)) for x in (both_signs, codes))
    y = matmul(lhs, rhs, dtype=jnp.float32)
    np.testing.assert_allclose(y, exact(lhs, rhs), rtol=1e-5)


# What holds for every implementation, beside the products of ``CASES``.
CHECKS: dict[str, Callable[[Any], None]] = {
    "outlier scale": check_outlier_scale,
    "outlier with residual": check_outlier_with_residual,
    "largest sums": functools.partial(check_largest_sums, sign=1),
    "largest negative sums": functools.partial(check_largest_sums, sign=-1),
    "largest sums, bounded": functools.partial(
        check_largest_sums, sign=1, sums=127.0 * 256
    ),
    "largest sums, not bounded": functools.partial(
        check_largest_sums, sign=-1, sums=np.nan
    ),
    # Of 136 sums, which are no multiple of those that are loaded at once.
    "largest sum at the end": functools.partial(
        check_largest_sums, sign=1, zero_columns=16
    ),
    "rounds once to bfloat16": functools.partial(check_rounds_once, dtype=jnp.bfloat16),
    "rounds once to float16": functools.partial(check_rounds_once, dtype=jnp.float16),
    "scales of rows round once": functools.partial(
        check_rounds_once, dtype=jnp.bfloat16, name="scales of rows"
    ),
    "scales of rows and columns round once": functools.partial(
        check_rounds_once, dtype=jnp.bfloat16, name="scales of rows and columns"
    ),
    "NaN scales": functools.partial(check_nan_scales, block_shape=(128, 128, 128)),
    "extreme scales": functools.partial(check_extreme_scales, dtype=jnp.float32),
    "extreme scales, bfloat16": functools.partial(
        check_extreme_scales, dtype=jnp.bfloat16
    ),
    "extreme codes": functools.partial(check_extreme_codes, k=128),
}
