"""The Triton GEMMs for a few rows: what they compute in Triton's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels.quantized import Unquantized
from tests.kernels import gemm_cases, quantize_matmul_cases, triton_tools
from tests.kernels.gemm_cases import Case
from tests.kernels.quantize_cases import SPECIAL_DTYPES
from tests.kernels.quantize_matmul_cases import CASES as QUANTIZED
from tests.marks import slow, with_first_fast

CASES = {
    "one row": Case((1, 1, 256, 128), (128, 128, 128), None),
    "one row, fallback": Case((2, 1, 512, 160), (128, 128, 128), 0.3),
    "unaligned": Case((2, 40, 304, 190), (128, 128, 128), 0.5),
    "one element": Case((3, 1, 1, 1), (128, 128, 128), 1.0),
    "32x32x32 blocks": Case((2, 30, 100, 80), (32, 32, 32), 0.3),
    "64x256x32 blocks": Case((1, 64, 600, 100), (64, 256, 32), 0.3),
    "scales of rows": Case((2, 40, 300, 200), (1, 128, 128), 0.3),
    "scales of rows and columns": Case((1, 30, 200, 90), (1, 128, 1), None),
    "FP8": Case((2, 20, 300, 200), (1, 128, 128), None, "float8_e4m3fn"),
}


# Each has what other cases have one by one, or other sizes of block.
SLOW = {"one row", "32x32x32 blocks", "64x256x32 blocks", "scales of rows"}


def interpreted(sm, **config):
    """The product of operands that are quantized, or not."""
    load = triton_tools.interpreted
    one, product = load("few_rows_quantize_gemm"), load("few_rows_gemm")
    options = {"num_warps": 4, "num_stages": 2} | config
    settings = product.Config(**options) if config else None

    def matmul(lhs, rhs, *, dtype):
        module = one if isinstance(lhs, Unquantized) else product
        return module.matmul(lhs, rhs, dtype=dtype, sm=sm, config=settings)

    return matmul


@pytest.mark.parametrize("name", slow(CASES, SLOW))
def test_matches_float64(name):
    gemm_cases.check_against_float64(interpreted(90), CASES[name])


@pytest.mark.parametrize(
    ("name", "sm", "config"),
    [
        ("unaligned", 80, {}),
        ("32x32x32 blocks", 90, {"BN": 64, "splits": 1}),
        # Programs share the K blocks.
        ("unaligned", 90, {"BN": 32, "splits": 2}),
        ("one row", 90, {"BN": 32, "splits": 2}),
    ],
)
def test_other_configurations_match_float64(name, sm, config):
    gemm_cases.check_against_float64(interpreted(sm, **config), CASES[name])


@pytest.mark.parametrize(
    ("shape", "sm", "expected"),
    [
        ((1, 1, 28672, 4096), 90, (64, 1, 4, 4)),
        ((1, 8, 6144, 4096), 90, (64, 4, 4, 4)),
        ((1, 8, 4096, 14336), 90, (64, 8, 4, 4)),
        ((1, 128, 6144, 4096), 90, (64, 2, 4, 4)),
        ((1, 128, 4096, 4096), 86, (64, 4, 4, 4)),
        ((1, 8, 128, 1024), 80, (64, 1, 4, 4)),
    ],
)
def test_small_matrices_are_split(shape, sm, expected):
    choose = triton_tools.interpreted("few_rows_gemm").default_config
    assert choose(shape, 128, sm=sm) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 8, 28672, 4096), (64, 1, 4, 4)), ((1, 8, 4096, 14336), (32, 1, 4, 4))],
)
def test_programs_share_no_ordered_sum(shape, expected):
    choose = triton_tools.interpreted("few_rows_gemm").default_config
    assert choose(shape, 128, sm=90, ordered=True) == expected


def test_nan_scales_propagate():
    lhs, rhs = gemm_cases.operands(CASES["unaligned"])
    lhs = gemm_cases.with_scales(lhs, lambda s: s.at[0, 0, 2].set(jnp.nan), "residual")
    rhs = gemm_cases.with_scales(rhs, lambda s: s.at[1, -1, 0].set(jnp.nan))
    y = interpreted(90)(lhs, rhs, dtype=jnp.float32)
    expected = np.isnan(gemm_cases.exact(lhs, rhs))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.isnan(y), expected)


# Scales of blocks and of rows.
FAST = {"eight rows, fallback", "scales of rows and columns"}


@pytest.mark.parametrize("name", slow(QUANTIZED, QUANTIZED.keys() - FAST))
def test_quantization_in_the_product_has_the_bits_of_two_kernels(name):
    quantize_matmul_cases.check(interpreted(90), QUANTIZED[name])


@pytest.mark.exhaustive
def test_programs_that_quantize_share_the_k_blocks():
    matmul = interpreted(80, BN=32, splits=3)
    quantize_matmul_cases.check(matmul, QUANTIZED["unaligned"])


@pytest.mark.parametrize("fallback", with_first_fast([False, True]))
@pytest.mark.parametrize("dtype", with_first_fast(SPECIAL_DTYPES))
def test_special_blocks_quantized_in_the_product(dtype, fallback):
    quantize_matmul_cases.check_special(interpreted(90), dtype, fallback)


@pytest.mark.parametrize(
    ("shape", "itemsize", "sm"),
    [
        ((1, 8, 4096, 14336), 2, 90),
        ((1, 1, 28672, 4096), 4, 80),
        ((2, 32, 1024, 4096), 2, 86),
    ],
)
def test_splits_do_not_depend_on_who_quantizes(shape, itemsize, sm):
    """Or the order of a sum would."""
    one, two = (
        triton_tools.interpreted(name).default_config
        for name in ("few_rows_quantize_gemm", "few_rows_gemm")
    )
    config = one(shape, 128, itemsize=itemsize, sm=sm)
    assert config.splits == two(shape, 128, sm=sm).splits
