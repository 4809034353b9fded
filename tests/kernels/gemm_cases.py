"""What any implementation of ``reference.matmul`` must do, given as ``matmul``."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels.reference import Quantized
from tests import oracle


class Case(NamedTuple):
    """Sizes ``B, M, K, N``; sides of blocks; which part falls back, None without."""

    shape: tuple[int, int, int, int]
    blocks: tuple[int, int, int]
    fallback: float | None


CASES = {
    "aligned": Case((1, 128, 256, 256), (128, 128, 128), None),
    "aligned, fallback": Case((2, 128, 512, 128), (128, 128, 128), 0.3),
    "ragged": Case((2, 70, 304, 190), (128, 128, 128), None),
    "ragged, fallback": Case((2, 200, 333, 135), (128, 128, 128), 0.5),
    "many tiles": Case((1, 700, 64, 300), (128, 64, 128), 0.5),
    "one element": Case((3, 1, 1, 1), (128, 128, 128), 1.0),
    "no block falls back": Case((1, 32, 320, 32), (32, 32, 32), 0.0),
    "every block falls back": Case((1, 130, 260, 64), (64, 64, 64), 1.0),
    "small blocks": Case((2, 100, 200, 150), (32, 32, 32), 0.3),
    "large blocks": Case((1, 300, 560, 270), (256, 256, 256), 0.3),
    "wide blocks": Case((1, 150, 400, 140), (32, 128, 256), 0.3),
    "long blocks": Case((1, 140, 600, 100), (64, 256, 32), 0.3),
    "high blocks": Case((1, 260, 150, 200), (256, 64, 64), 0.3),
    "flat blocks": Case((1, 90, 150, 280), (128, 32, 256), None),
}


def operands(
    case: Case, seed: int = 0
) -> tuple[Quantized, Quantized | None, Quantized]:
    """Random codes, also of residuals that are not taken, and positive scales."""
    rng = np.random.default_rng(seed)
    (batch, M, K, N), (m, k, n), fallback = case

    def quantized(rows: int, side: int, taken: float) -> Quantized:
        codes = rng.integers(-127, 128, (batch, rows, K)).astype(np.int8)
        shape = (batch, -(-rows // side), -(-K // k))
        scales = rng.uniform(0.5, 2.0, shape) * (rng.random(shape) < taken)
        return Quantized(jnp.asarray(codes), jnp.asarray(scales, jnp.float32))

    lhs, rhs = quantized(M, m, 1.0), quantized(N, n, 1.0)
    return lhs, None if fallback is None else quantized(M, m, fallback), rhs


def exact(lhs, residual, rhs, blocks) -> np.ndarray:
    """The product in float64."""
    m, k, n = blocks

    def dequantize(operand, block):
        pairs = zip(*map(np.asarray, operand), strict=True)
        return np.stack([oracle.dequantize(*pair, block) for pair in pairs])

    values = dequantize(lhs, (m, k))
    if residual is not None:
        values += dequantize(residual, (m, k))
    with np.errstate(invalid="ignore"):
        return values @ dequantize(rhs, (n, k)).mT


def check_against_float64(matmul, case: Case) -> None:
    args = operands(case)
    y = matmul(*args, block_shape=case.blocks, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    assert oracle.relative(y, exact(*args, case.blocks)) <= 1e-5


def check_scales_far_apart(matmul) -> None:
    """Rows that share a block with an outlier have codes 0 there, and lose nothing."""
    lhs, _, rhs = operands(Case((1, 128, 1280, 128), (128, 128, 128), None))
    outlier = lhs.codes.at[:, :, 128:256].set(0).at[:, 5, 200].set(127)
    scales = lhs.scales.at[0, 0, 1].mul(10_000.0)
    lhs = Quantized(outlier, scales)
    blocks = 128, 128, 128
    y = np.asarray(matmul(lhs, None, rhs, block_shape=blocks, dtype=jnp.float32))[0]
    wanted = exact(lhs, None, rhs, blocks)[0]
    others = np.arange(128) != 5
    assert oracle.relative(y[others], wanted[others]) <= 1e-6


def check_largest_sums(matmul, sign: int) -> None:
    """Every product is the largest there is, and sums leave any narrower range."""
    depth = 8 * 128
    codes = jnp.full((1, 128, depth), 127, jnp.int8)
    scales = jnp.full((1, 1, depth // 128), 2.0**-14)
    lhs, rhs = Quantized(sign * codes, scales), Quantized(codes, jnp.ones_like(scales))
    y = matmul(lhs, None, rhs, block_shape=(128, 128, 128), dtype=jnp.bfloat16)
    wanted = jnp.full_like(y, sign * 127.0**2 * 2.0**-14 * depth)
    np.testing.assert_array_equal(y, wanted)


def check_outlier_that_fell_back(matmul) -> None:
    """Rows that share its block keep the accuracy of 16 bits."""
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
    wanted = exact(*args, (128, 128, 128))[0, others]
    # Rounding to bfloat16 alone loses 1.7e-3.
    assert oracle.relative(np.asarray(y, np.float64)[0, others], wanted) <= 2e-3


def check_rounds_once(matmul, dtype) -> None:
    case = CASES["ragged, fallback"]
    args = operands(case)
    y = matmul(*args, block_shape=case.blocks, dtype=dtype)
    wide = matmul(*args, block_shape=case.blocks, dtype=jnp.float32)
    assert y.dtype == dtype
    # Sums in another order may round to the other neighbour, seldom; where terms cancel
    # they may be off by a product or two of the smallest codes.
    rounded = np.asarray(wide.astype(dtype), np.float64)
    y = np.asarray(y, np.float64)
    lhs, _, rhs = args
    near = 2.0 * float(jnp.max(lhs.scales) * jnp.max(rhs.scales))
    limit = 1.01 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y, rounded, rtol=limit, atol=near)
    assert np.mean(y == rounded) > (0.99 if dtype == jnp.bfloat16 else 0.95)


def check_nan_scales(matmul, block_shape: tuple[int, int, int]) -> None:
    """A NaN scale, a residual's too, shows in all that depends on it, nowhere else."""
    lhs, residual, rhs = operands(Case((1, 300, 300, 300), block_shape, 0.3))
    assert residual is not None
    lhs = lhs._replace(scales=lhs.scales.at[0, 0, 0].set(jnp.nan))
    residual = residual._replace(scales=residual.scales.at[0, 1, -1].set(jnp.nan))
    rhs = rhs._replace(scales=rhs.scales.at[0, -1, 0].set(jnp.nan))
    y = matmul(lhs, residual, rhs, block_shape=block_shape, dtype=jnp.float32)
    expected = np.isnan(exact(lhs, residual, rhs, block_shape))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.isnan(y), expected)


def check_extreme_codes(matmul, k: int) -> None:
    """The largest sums, over a K that int32 alone would not hold."""
    K = 140_032
    operand = Quantized(
        jnp.full((1, 2, K), 127, jnp.int8),
        jnp.full((1, 1, -(-K // k)), 2.0**-14, jnp.float32),
    )
    negative = operand._replace(codes=-operand.codes)
    for lhs in (operand, negative):
        y = matmul(lhs, None, operand, block_shape=(128, k, 128), dtype=jnp.float32)
        np.testing.assert_allclose(
            y, exact(lhs, None, operand, (128, k, 128)), rtol=1e-5
        )
