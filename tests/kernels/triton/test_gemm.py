"""The Triton GEMM: what it computes in Triton's interpreter."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import gemm_cases, triton_tools
from tests.kernels.gemm_cases import CASES, FLOAT8_CASES
from tests.marks import with_first_fast


def interpreted(sm=90):
    return functools.partial(triton_tools.interpreted("gemm").matmul, sm=sm)


# Blocks with and without residual, scales of rows and columns, one element.  Each of
# the others has what these have one by one, or other sizes of block.
FAST = {
    *("aligned", "unaligned, fallback", "one element", "every block falls back"),
    *("scales of rows", "scales of rows and columns", "scales of columns"),
}
FLOAT8 = [*FLOAT8_CASES.values(), *gemm_cases.FLOAT8_SMALL_CASES.values()]


@pytest.mark.parametrize(
    "case",
    [
        *[CASES[name] for name in CASES if name in FAST],
        *with_first_fast([CASES[name] for name in CASES if name not in FAST], 0),
        *with_first_fast(FLOAT8),
        gemm_cases.ROWS_AND_FALLBACK,
    ],
)
def test_matches_float64(case):
    gemm_cases.check_against_float64(interpreted(), case)


@pytest.mark.parametrize(
    "name", with_first_fast(["unaligned, fallback", "32x32x32 blocks"])
)
def test_matches_float64_on_ampere(name):
    gemm_cases.check_against_float64(interpreted(80), CASES[name])


@pytest.mark.parametrize("name", with_first_fast(["unaligned, fallback", "aligned"]))
def test_tiles_in_halves_match_float64(name):
    module = triton_tools.interpreted("gemm")
    config = module.Config(128, 128, halves=2, num_warps=4, num_stages=3, group=2)
    matmul = functools.partial(module.matmul, sm=90, config=config)
    gemm_cases.check_against_float64(matmul, CASES[name])


@pytest.mark.parametrize(
    "name",
    [
        *("rounds once to float16", "outlier scale", "NaN scales", "extreme scales"),
        pytest.param("extreme scales, bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_products(name):
    gemm_cases.CHECKS[name](interpreted())


@pytest.mark.exhaustive
def test_nan_scales_of_small_blocks_propagate():
    gemm_cases.check_nan_scales(interpreted(), (32, 64, 32))


@pytest.mark.parametrize(("sm", "K"), [(90, 140_032), (80, 600)])
def test_extreme_codes(sm, K):
    """Ampere's conversion of the largest products is exact, too."""
    gemm_cases.check_extreme_codes(interpreted(sm), k=256, K=K)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    "shape", with_first_fast([(5, 1200), (2, 5), (1, 1), (70, 40)])
)
def test_steps_are_listed_in_order(shape, longest_first):
    """The matrices of a batch have residuals nowhere, in 30 % of blocks, everywhere."""
    rng = np.random.default_rng(0)
    shape = (3, *shape)
    scales = rng.random(shape, np.float32)
    is_used = rng.random(shape) < np.asarray([0.0, 0.3, 1.0])[:, None, None]
    residual = np.where(is_used, rng.random(shape, np.float32), np.float32(0))
    residual[:, 0, 0] = np.nan
    lists = triton_tools.interpreted("gemm_schedule").list_steps(
        jnp.asarray(scales), jnp.asarray(residual), longest_first=longest_first
    )
    used = np.count_nonzero(residual, axis=2)
    rows = np.argsort(-used * longest_first, axis=1, stable=True)
    np.testing.assert_array_equal(lists.rows, rows)
    for matrix, position in np.ndindex(shape[:2]):
        place, row = (matrix, position), (matrix, rows[matrix, position])
        expected = [
            (2 * j + term, scale)
            for j, pair in enumerate(zip(scales[row], residual[row], strict=True))
            for term, scale in enumerate(pair)
            if term == 0 or scale != 0
        ]
        assert lists.counts[place] == lists.regular_counts[place] == len(expected)
        expected += [(0, 0.0)] * (2 * shape[2] - len(expected))
        codes = [code for code, _ in expected]
        np.testing.assert_array_equal(lists.order[place], codes)
        np.testing.assert_array_equal(
            lists.scales[place], np.asarray([s for _, s in expected], np.float32)
        )


def test_outlier_steps_come_last():
    scales = np.asarray([[[1.0, 0.0, 2.0, 90.0, 0.5, np.nan, 1.0, 100.0]]], np.float32)
    residual = np.where(scales == 90.0, np.float32(0.5), 0)
    mean = 9000.0 ** (1 / 6)
    lists = triton_tools.interpreted("gemm_schedule").list_steps(
        jnp.asarray(scales), jnp.asarray(residual), outlier_ratio=80.0 / mean
    )
    assert (lists.regular_counts[0, 0], lists.counts[0, 0]) == (6, 9)
    expected = [1.0, 0.0, 2.0, 0.5, np.nan, 1.0, 90.0, 0.5, 100.0]
    np.testing.assert_array_equal(lists.scales[0, 0, :9], expected)
    np.testing.assert_array_equal(lists.order[0, 0, :9], [0, 2, 4, 8, 10, 12, 6, 7, 14])


def test_max_abs_sum():
    codes = np.random.default_rng(0).integers(-127, 128, (2, 256, 384)).astype(np.int8)
    codes[1, 200, 128:256] = -128
    sums = triton_tools.interpreted("abs_sums").max_abs_sum(jnp.asarray(codes))
    expected = np.abs(codes.astype(int)).reshape(2, 2, 128, 3, 128).sum(4)
    np.testing.assert_array_equal(sums, expected.max(2))
    assert sums[1, 1, 1] == 128 * 128
