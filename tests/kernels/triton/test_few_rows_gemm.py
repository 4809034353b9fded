"""The Triton GEMMs for a few rows: in Triton's interpreter, and how they compile."""

import functools
import itertools
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
import triton

from fbq_jax.kernels.quantized import Unquantized
from tests.kernels import gemm_cases, quantize_matmul_cases, triton_tools
from tests.kernels.gemm_cases import Case
from tests.kernels.quantize_cases import SPECIAL_DTYPES
from tests.marks import rows_with_first_fast, with_first_fast

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


def interpreted(sm):
    return functools.partial(triton_tools.interpreted("few_rows_gemm").matmul, sm=sm)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SLOW))
        for name in CASES
    ],
)
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
    ("shape", "sm", "expected"),
    [
        ((1, 1, 28672, 4096), 90, (64, 1, 4, 4)),
        ((1, 8, 6144, 4096), 90, (64, 4, 4, 4)),
        ((1, 8, 4096, 14336), 90, (64, 8, 4, 4)),
        ((1, 32, 4096, 4096), 90, (64, 4, 4, 4)),
        ((1, 128, 6144, 4096), 90, (64, 2, 4, 4)),
        ((1, 128, 4096, 4096), 86, (64, 4, 4, 4)),
        ((1, 8, 128, 1024), 80, (64, 1, 4, 4)),
        ((2, 8, 128, 128), 80, (64, 1, 4, 4)),
    ],
)
def test_small_matrices_are_split(shape, sm, expected):
    choose = triton_tools.interpreted("few_rows_gemm").default_config
    assert choose(shape, 128, sm=sm) == expected


def test_nan_scales_propagate():
    lhs, rhs = gemm_cases.operands(CASES["unaligned"])
    lhs = gemm_cases.with_scales(lhs, lambda s: s.at[0, 0, 2].set(jnp.nan), "residual")
    rhs = gemm_cases.with_scales(rhs, lambda s: s.at[1, -1, 0].set(jnp.nan))
    y = interpreted(90)(lhs, rhs, dtype=jnp.float32)
    expected = np.isnan(gemm_cases.exact(lhs, rhs))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.isnan(y), expected)


@pytest.mark.parametrize(
    ("capability", "tile"),
    rows_with_first_fast(
        itertools.product([90, 80, 86], [(64, 128), (1, 128), (128, 128), (128, 256)])
    ),
)
def test_compiles_without_spills(capability, tile):
    rows, block = tile
    case = Case((1, rows, 512, 256), (block,) * 3, 0.3)
    (kernel,) = triton_tools.compile_kernels(
        "few_rows_gemm",
        "matmul",
        *gemm_cases.operands(case),
        capability=capability,
        dtype=jnp.bfloat16,
        sm=capability,
    )
    assert kernel.spills == 0
    assert "mma" in kernel.ptx


@pytest.mark.exhaustive
def test_the_assembler_keeps_the_products_of_all_steps(tmp_path):
    """It loses some of them in an unrolled loop of 16 rows."""
    case = Case((1, 16, 1024, 4096), (128, 128, 128), None)
    (kernel,) = triton_tools.compile_kernels(
        "few_rows_gemm",
        "matmul",
        *gemm_cases.operands(case),
        capability=90,
        dtype=jnp.bfloat16,
        sm=90,
    )
    assert "wgmma" in kernel.ptx
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(kernel.ptx)
    tools = triton.knobs.nvidia
    assemble = [tools.ptxas.path, "-arch", "sm_90a", ptx, "-o", cubin]
    subprocess.run(assemble, check=True)
    disassemble = [tools.nvdisasm.path, "-c", cubin]
    done = subprocess.run(disassemble, check=True, capture_output=True, text=True)
    assert "GMMA" in done.stdout
    assert "gdesc[URZ]" not in done.stdout  # what is left of a lost product


def interpreted_matmul(sm, config=None):
    """The product of operands that are quantized, or not."""
    load = triton_tools.interpreted
    one, product = load("few_rows_quantize_gemm"), load("few_rows_gemm")

    def matmul(lhs, rhs, *, dtype):
        module = one if isinstance(lhs, Unquantized) else product
        return module.matmul(lhs, rhs, dtype=dtype, sm=sm, config=config)

    return matmul


# Scales of blocks and of rows.
FAST = {"eight rows, fallback", "scales of rows and columns"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in FAST))
        for name in quantize_matmul_cases.CASES
    ],
)
def test_quantization_in_the_product_has_the_bits_of_two_kernels(name):
    case = quantize_matmul_cases.CASES[name]
    quantize_matmul_cases.check(interpreted_matmul(90), case)


@pytest.mark.exhaustive
def test_programs_that_quantize_share_the_k_blocks():
    config = triton_tools.interpreted("few_rows_gemm").Config(32, 3, 4, 2)
    case = quantize_matmul_cases.CASES["unaligned"]
    quantize_matmul_cases.check(interpreted_matmul(80, config), case)


@pytest.mark.parametrize("fallback", with_first_fast([False, True]))
@pytest.mark.parametrize("dtype", with_first_fast(SPECIAL_DTYPES))
def test_special_blocks_quantized_in_the_product(dtype, fallback):
    quantize_matmul_cases.check_special(interpreted_matmul(90), dtype, fallback)


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


@pytest.mark.parametrize("capability", with_first_fast([90, 80, 86, 89]))
@pytest.mark.parametrize(
    "problem",
    with_first_fast(
        [
            (8, (128, 128, 128), "bfloat16"),
            (32, (128, 128, 128), "bfloat16"),
            (32, (256, 256, 256), "float32"),
            (16, (1, 128, 128), "bfloat16"),
            (8, (32, 32, 32), "float16"),
        ],
        fast=2,
    ),
)
def test_quantization_in_the_product_compiles_without_spills(capability, problem):
    rows, blocks, dtype = problem
    theta = None if blocks[0] == 1 else (0.0,)
    case = quantize_matmul_cases.Case((1, rows, 512, 256), blocks, theta, dtype)
    (kernel,) = triton_tools.compile_kernels(
        "few_rows_quantize_gemm",
        "matmul",
        *quantize_matmul_cases.operands(case),
        capability=capability,
        dtype=jnp.bfloat16,
        sm=capability,
    )
    assert kernel.spills == 0
    assert "mma" in kernel.ptx
    assert "cp.async" in kernel.ptx  # of rhs, while other blocks are multiplied
