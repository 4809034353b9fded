"""The Triton GEMM: what it computes in Triton's interpreter, and how it compiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from tests.compile_tools import SHARED_MEMORY
from tests.kernels import gemm_cases, triton_tools
from tests.kernels.gemm_cases import FLOAT8_CASES
from tests.marks import with_first_fast


def interpreted(sm):
    return functools.partial(triton_tools.interpreted("gemm").matmul, sm=sm)


# Each has what other cases have one by one, or other sizes of block.
SLOW = {
    "32x128x256 blocks",
    "64x256x32 blocks",
    "128x32x256 blocks",
    "256x64x64 blocks",
    "aligned, fallback",
    "unaligned",
    "few rows of many K blocks",
    "scales of few rows",
    "256x256x256 blocks",
    "many tiles",
    "few rows, fallback",
    "no block falls back",
    "32x32x32 blocks",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SLOW))
        for name in gemm_cases.CASES
    ],
)
def test_matches_float64(name):
    gemm_cases.check_against_float64(interpreted(90), gemm_cases.CASES[name])


@pytest.mark.parametrize(
    "case",
    with_first_fast([*FLOAT8_CASES.values(), *gemm_cases.FLOAT8_SMALL_CASES.values()]),
)
def test_float8_matches_float64(case):
    gemm_cases.check_against_float64(interpreted(90), case)


def test_scales_of_rows_with_fallback_match_float64():
    gemm_cases.check_against_float64(interpreted(90), gemm_cases.ROWS_AND_FALLBACK)


@pytest.mark.parametrize(
    "name", with_first_fast(["unaligned, fallback", "32x32x32 blocks"])
)
def test_matches_float64_on_ampere(name):
    gemm_cases.check_against_float64(interpreted(80), gemm_cases.CASES[name])


@pytest.mark.parametrize("name", with_first_fast(["unaligned, fallback", "aligned"]))
def test_tiles_in_halves_match_float64(name):
    module = triton_tools.interpreted("gemm")
    config = module.Config(128, 128, halves=2, num_warps=4, num_stages=3, group=2)
    matmul = functools.partial(module.matmul, sm=90, config=config)
    gemm_cases.check_against_float64(matmul, gemm_cases.CASES[name])


def test_reference_matches_float64():
    case = gemm_cases.CASES["unaligned, fallback"]
    matmul = jax.jit(reference.matmul, static_argnames="dtype")
    gemm_cases.check_against_float64(matmul, case)


@pytest.mark.parametrize("dtype", with_first_fast([jnp.float32, jnp.bfloat16]))
def test_extreme_scales(dtype):
    gemm_cases.check_extreme_scales(interpreted(90), dtype)
    matmul = jax.jit(reference.matmul, static_argnames="dtype")
    gemm_cases.check_extreme_scales(matmul, dtype)


def test_rounds_once():
    gemm_cases.check_rounds_once(interpreted(90), jnp.float16)


def test_outlier_scale_leaves_other_rows_accurate():
    gemm_cases.check_outlier_scale(interpreted(90))


@pytest.mark.parametrize("blocks", with_first_fast([(128, 128, 128), (32, 64, 32)]))
def test_nan_scales_propagate(blocks):
    gemm_cases.check_nan_scales(interpreted(90), blocks)


def test_long_contraction_does_not_overflow():
    gemm_cases.check_extreme_codes(interpreted(90), k=256)


def test_largest_products_are_converted_exactly_on_ampere():
    gemm_cases.check_extreme_codes(interpreted(80), k=256, K=600)


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


@functools.cache
def compiled(shape, blocks, fallback, sm, codes="int8"):
    """Compiles the GEMM, and checks that the kernels before it do not spill."""
    (M, K, N), (m, k, n) = shape, blocks
    *others, gemm = triton_tools.compile_kernels(
        "gemm",
        "matmul",
        gemm_cases.shapes((2, M, K), (m, k), codes, fallback=fallback),
        gemm_cases.shapes((2, N, K), (n, k), codes),
        capability=sm,
        sm=sm,
        dtype=jnp.bfloat16,
    )
    assert all(kernel.spills == 0 for kernel in others)
    return gemm


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((4096, 4096, 4096), (128, 128, 128)),
        ((1000, 1000, 1000), (256, 256, 256)),
        ((1000, 1000, 1000), (32, 64, 32)),
        ((4096, 4096, 4096), (1, 128, 128)),
        ((4096, 4096, 4096), (1, 128, 1)),
    ],
)
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("sm", SHARED_MEMORY)
def test_compiles_to_tensor_core_products_without_spills(sm, fallback, shape, blocks):
    gemm = compiled(shape, blocks, fallback, sm)
    product = r"wgmma\.mma_async\S*s32\.s8\.s8" if sm == 90 else r"mma\.sync\S*s32\.s8"
    assert re.search(product, gemm.ptx)
    assert gemm.spills == 0
    assert gemm.shared <= SHARED_MEMORY[sm]
    assert ("cvt.rn.f32.s32" in gemm.ptx) == (sm >= 89)
    assert "cvt.rn.bf16x2.f32" in gemm.ptx
    assert "cp.async.cg.shared.global" in gemm.ptx, "loads are not 16 bytes wide"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((1000, 1000, 1000), (1, 32, 32)),
        ((4096, 4096, 4096), (1, 128, 128)),
        ((4096, 4096, 4096), (1, 128, 1)),
    ],
)
@pytest.mark.parametrize("sm", [sm for sm in SHARED_MEMORY if sm >= 89])
def test_float8_compiles_to_tensor_core_products_without_spills(sm, shape, blocks):
    gemm = compiled(shape, blocks, False, sm, "float8_e4m3fn")
    products = {90: r"wgmma\.mma_async\S*f32\.e4m3\.e4m3"}
    product = products.get(sm, r"mma\.sync\S*f32\.e4m3\.e4m3")
    assert re.search(product, gemm.ptx)
    assert gemm.spills == 0
    assert gemm.shared <= SHARED_MEMORY[sm]
    assert "cp.async.cg.shared.global" in gemm.ptx, "loads are not 16 bytes wide"


@pytest.mark.parametrize("codes", with_first_fast(["int8", "float8_e4m3fn"]))
def test_each_scale_of_a_row_is_loaded_once(codes):
    """Without care, the compiler loads it for every column."""
    gemm = compiled((4096, 4096, 4096), (1, 128, 128), False, 90, codes)
    rows_of_a_thread = 2
    assert gemm.ptx.count("ld.global") == rows_of_a_thread + 1
    assert gemm.ptx.count("mul.rn.f32") == rows_of_a_thread


@pytest.mark.parametrize("fallback", with_first_fast([False, True]))
def test_two_programs_share_a_multiprocessor_of_hopper(fallback):
    gemm = compiled((4096, 4096, 4096), (128, 128, 128), fallback, 90)
    assert gemm.spills == 0
    assert 2 * 32 * gemm.num_warps * gemm.registers <= 2**16
    assert 2 * (gemm.shared + 1024) <= 228 * 1024
