"""The Triton GEMM for a few rows: in Triton's interpreter, and how it compiles."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import gemm_cases, triton_tools
from tests.kernels.gemm_cases import Case

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
SM = {"hopper": 90, "ampere": 80}


def interpreted(sm):
    return functools.partial(triton_tools.interpreted("few_rows_gemm").matmul, sm=sm)


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name):
    gemm_cases.check_against_float64(interpreted(90), CASES[name])


def test_matches_float64_on_ampere():
    gemm_cases.check_against_float64(interpreted(80), CASES["unaligned"])


def test_tiles_of_several_column_blocks():
    module = triton_tools.interpreted("few_rows_gemm")
    config = module.Config(BN=64, splits=1, num_warps=4, num_stages=2)
    matmul = functools.partial(module.matmul, sm=90, config=config)
    gemm_cases.check_against_float64(matmul, CASES["32x32x32 blocks"])


@pytest.mark.parametrize(("name", "splits"), [("unaligned", 2), ("one row", 2)])
def test_programs_share_the_k_blocks(name, splits):
    module = triton_tools.interpreted("few_rows_gemm")
    config = module.Config(BN=32, splits=splits, num_warps=4, num_stages=2)
    matmul = functools.partial(module.matmul, sm=90, config=config)
    gemm_cases.check_against_float64(matmul, CASES[name])


@pytest.mark.parametrize(
    ("shape", "fallback", "sm", "expected"),
    [
        ((1, 1, 28672, 4096), False, 90, (32, 1, 2, 4)),
        ((1, 8, 4096, 14336), True, 90, (32, 4, 2, 4)),
        ((1, 32, 4096, 4096), True, 90, (64, 4, 4, 4)),
        ((1, 128, 4096, 4096), False, 90, (64, 4, 4, 4)),
        ((1, 128, 4096, 4096), True, 90, (128, 8, 8, 4)),
        ((1, 128, 4096, 4096), True, 86, (64, 4, 8, 2)),
        ((1, 8, 128, 1024), False, 80, (32, 2, 2, 4)),
        ((2, 8, 128, 128), False, 80, (32, 1, 2, 4)),
    ],
)
def test_small_matrices_are_split(shape, fallback, sm, expected):
    choose = triton_tools.interpreted("few_rows_gemm").default_config
    assert choose(shape, 128, fallback=fallback, sm=sm) == expected


def test_nan_scales_propagate():
    lhs, residual, rhs = gemm_cases.operands(CASES["unaligned"])
    residual = residual._replace(scales=residual.scales.at[0, 0, 2].set(jnp.nan))
    rhs = rhs._replace(scales=rhs.scales.at[1, -1, 0].set(jnp.nan))
    blocks = 128, 128, 128
    y = interpreted(90)(lhs, residual, rhs, block_shape=blocks, dtype=jnp.float32)
    expected = np.isnan(gemm_cases.exact(lhs, residual, rhs, blocks))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.isnan(y), expected)


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("rows", [1, 64, 128])
def test_compiles_without_spills(capability, rows):
    case = Case((1, rows, 512, 256), (128, 128, 128), 0.3)
    (kernel,) = triton_tools.compile_kernels(
        "few_rows_gemm",
        "matmul",
        *gemm_cases.operands(case),
        capability=capability,
        block_shape=case.blocks,
        dtype=jnp.bfloat16,
        sm=capability,
    )
    assert kernel.spills == 0
    assert "mma" in kernel.ptx
