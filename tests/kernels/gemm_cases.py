"""Checks that every implementation of ``reference.matmul`` must pass.

Each check takes the implementation as its argument ``matmul``.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels.reference import Quantized
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
FLOAT8_SMALL_CASES = {
    "blocks of 32": Case((1, 70, 100, 80), (1, 32, 32), *_FLOAT8),
}


def operands(
    case: Case, seed: int = 0
) -> tuple[Quantized, Quantized | None, Quantized]:
    """Returns lhs, its residual and rhs: random codes and positive scales.

    Residuals that are not used have scale 0 and random codes.
    """
    rng = np.random.default_rng(seed)
    (batch, M, K, N), (m, k, n), fallback, dtype = case

    def quantized(rows: int, block_rows: int, used: float) -> Quantized:
        codes = rng.integers(-127, 128, (batch, rows, K)).astype(np.int8)
        if dtype != "int8":  # the bits of any finite codes
            codes = (codes % 127 | codes & -128).astype(np.int8).view(dtype)
        shape = (batch, -(-rows // block_rows), -(-K // k))
        scales = rng.uniform(0.5, 2.0, shape) * (rng.random(shape) < used)
        return Quantized(jnp.asarray(codes), jnp.asarray(scales, jnp.float32))

    lhs, rhs = quantized(M, m, 1.0), quantized(N, n, 1.0)
    return lhs, None if fallback is None else quantized(M, m, fallback), rhs


def exact(lhs, residual, rhs, block_shape) -> np.ndarray:
    """The product in float64."""
    m, k, n = block_shape
    values = oracle.dequantize_stack(lhs, (m, k))
    if residual is not None:
        values += oracle.dequantize_stack(residual, (m, k))
    with np.errstate(invalid="ignore"):
        return values @ oracle.dequantize_stack(rhs, (n, k)).mT


def check_against_float64(matmul, case: Case, tolerance: float = 1e-5) -> None:
    args = operands(case)
    y = matmul(*args, block_shape=case.blocks, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    assert oracle.relative(y, exact(*args, case.blocks)) <= tolerance


def check_outlier_scale(matmul) -> None:
    """Rows with codes 0 in the block of an outlier lose no accuracy to its scale."""
    lhs, _, rhs = operands(Case((1, 128, 1280, 128), (128, 128, 128), None))
    codes = lhs.codes.at[:, :, 128:256].set(0).at[:, 5, 200].set(127)
    scales = lhs.scales.at[0, 0, 1].mul(10_000.0)
    lhs = Quantized(codes, scales)
    blocks = 128, 128, 128
    y = np.asarray(matmul(lhs, None, rhs, block_shape=blocks, dtype=jnp.float32))[0]
    expected = exact(lhs, None, rhs, blocks)[0]
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
    lhs = Quantized(sign * codes, scales)
    rhs = Quantized(rhs_codes, rhs_scales, bounds)
    y = matmul(lhs, None, rhs, block_shape=(128, 128, 128), dtype=jnp.bfloat16)
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
    lhs = Quantized(main, ones.at[0, 0, 1].set(2000.0))
    residual = Quantized(term, jnp.zeros_like(ones).at[0, 0, 1].set(8.0))
    args = lhs, residual, Quantized(rhs, ones)
    y = matmul(*args, block_shape=(128, 128, 128), dtype=jnp.bfloat16)
    others = np.arange(128) != 5
    expected = exact(*args, (128, 128, 128))[0, others]
    # Rounding to bfloat16 alone loses 1.7e-3.
    assert oracle.relative(np.asarray(y, np.float64)[0, others], expected) <= 2e-3


def check_rounds_once(matmul, dtype, name: str = "unaligned, fallback") -> None:
    case = CASES[name]
    args = operands(case)
    y = matmul(*args, block_shape=case.blocks, dtype=dtype)
    wide = matmul(*args, block_shape=case.blocks, dtype=jnp.float32)
    assert y.dtype == dtype
    # Sums in another order may round to the other neighbour, which is rare; Inf is a
    # neighbour of the largest value. Where terms cancel, they may differ by one or two
    # products of the smallest codes.
    largest = float(jnp.finfo(dtype).max)
    rounded = np.asarray(wide.astype(dtype), np.float64).clip(-largest, largest)
    y = np.asarray(y, np.float64).clip(-largest, largest)
    lhs, _, rhs = args
    atol = 2.0 * float(jnp.max(lhs.scales) * jnp.max(rhs.scales))
    rtol = 1.01 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y, rounded, rtol=rtol, atol=atol)
    assert np.mean(y == rounded) > (0.99 if dtype == jnp.bfloat16 else 0.95)


def check_nan_scales(matmul, block_shape: tuple[int, int, int]) -> None:
    """A NaN scale shows in every output that depends on it, and in no other."""
    m, k, n = block_shape
    shape = (1, 2 * m + 44, 2 * k + 44, 2 * n + 44)
    lhs, residual, rhs = operands(Case(shape, block_shape, 0.3))
    assert residual is not None
    lhs = lhs._replace(scales=lhs.scales.at[0, 0, 0].set(jnp.nan))
    residual = residual._replace(scales=residual.scales.at[0, 1, -1].set(jnp.nan))
    rhs = rhs._replace(scales=rhs.scales.at[0, -1, 0].set(jnp.nan))
    y = matmul(lhs, residual, rhs, block_shape=block_shape, dtype=jnp.float32)
    expected = np.isnan(exact(lhs, residual, rhs, block_shape))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.isnan(y), expected)


def check_extreme_scales(matmul, dtype) -> None:
    """Products of scales far below and above float32's range, and just inside it."""
    K, blocks = 512, (128, 128, 128)
    lhs, _, rhs = operands(Case((1, 128, K, 128), blocks, None))
    for exponent in (-146, -134, -124, 0, 101, 110, 130):
        half = exponent // 2
        x = lhs._replace(scales=lhs.scales * 2.0**half)
        w = rhs._replace(scales=rhs.scales * 2.0 ** (exponent - half))
        y = np.asarray(matmul(x, None, w, block_shape=blocks, dtype=dtype), np.float64)
        expected = exact(x, None, w, blocks)
        sizes = (term._replace(codes=jnp.abs(term.codes)) for term in (x, w))
        x_size, w_size = sizes
        bound = 2.0**-22 * exact(x_size, None, w_size, blocks)
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
    lhs, rhs = Quantized(both_signs, scales), Quantized(codes, scales)
    y = matmul(lhs, None, rhs, block_shape=(128, k, 128), dtype=jnp.float32)
    np.testing.assert_allclose(y, exact(lhs, None, rhs, (128, k, 128)), rtol=1e-5)
