"""The Triton GEMM in Triton's interpreter, and what it compiles to."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import Quantized
from tests.kernels import gemm_cases, triton_tools

# Of the GPUs: A100, RTX 4090, H100. Bytes of shared memory a program may have.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def interpreted(sm):
    return functools.partial(triton_tools.interpreted("matmul").matmul, sm=sm)


@pytest.mark.parametrize("name", gemm_cases.CASES)
def test_against_float64(name):
    gemm_cases.check_against_float64(interpreted(90), gemm_cases.CASES[name])


@pytest.mark.parametrize("name", ["ragged, fallback", "small blocks"])
def test_against_float64_as_on_ampere(name):
    gemm_cases.check_against_float64(interpreted(80), gemm_cases.CASES[name])


@pytest.mark.parametrize("name", ["aligned", "ragged, fallback"])
def test_halves_of_a_tile(monkeypatch, name):
    module = triton_tools.interpreted("matmul")
    config = module.Config(128, 128, halves=2, num_warps=4, num_stages=3, group=2)
    monkeypatch.setattr(module, "choose_config", lambda *_, **__: config)
    case = gemm_cases.CASES[name]
    gemm_cases.check_against_float64(functools.partial(module.matmul, sm=90), case)


@pytest.mark.parametrize("name", ["ragged, fallback", "no block falls back"])
def test_reference_against_float64(name):
    gemm_cases.check_against_float64(reference.matmul, gemm_cases.CASES[name])


def test_rounds_once():
    """Not to bfloat16, to which the interpreter truncates."""
    gemm_cases.check_rounds_once(interpreted(90), jnp.float16)


def test_scales_far_apart():
    gemm_cases.check_scales_far_apart(interpreted(90))


@pytest.mark.parametrize("blocks", [(128, 128, 128), (32, 64, 32)])
def test_nan_scales(blocks):
    gemm_cases.check_nan_scales(interpreted(90), blocks)


@pytest.mark.parametrize("sm", [80, 90])
def test_extreme_codes(sm):
    gemm_cases.check_extreme_codes(interpreted(sm), k=256)


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (1, 2, 1500)])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_steps(shape, rate):
    rng = np.random.default_rng(0)
    scales = rng.random(shape, np.float32)
    residual = np.where(rng.random(shape) < rate, rng.random(shape, np.float32), 0)
    residual[0, 0, 0] = np.nan
    order, step_scales, counts, near = triton_tools.interpreted("steps").steps(
        jnp.asarray(scales), jnp.asarray(residual, jnp.float32)
    )
    for row in np.ndindex(shape[:2]):
        expected = [
            (2 * j + term, scale)
            for j, pair in enumerate(zip(scales[row], residual[row], strict=True))
            for term, scale in enumerate(pair)
            if term == 0 or scale != 0
        ]
        assert counts[row] == near[row] == len(expected)
        expected += [(0, 0.0)] * (2 * shape[2] - len(expected))
        np.testing.assert_array_equal(order[row], [entry for entry, _ in expected])
        np.testing.assert_array_equal(
            step_scales[row], np.asarray([s for _, s in expected], np.float32)
        )


def test_steps_with_scales_far_from_others_come_last():
    scales = np.asarray([[[1.0, 0.0, 2.0, 90.0, 0.5, np.nan, 1.0, 100.0]]], np.float32)
    residual = np.where(scales == 90.0, np.float32(0.5), 0)
    mean = 9000.0 ** (1 / 6)
    order, step_scales, counts, near = triton_tools.interpreted("steps").steps(
        jnp.asarray(scales), jnp.asarray(residual), far=80.0 / mean
    )
    assert (near[0, 0], counts[0, 0]) == (6, 9)
    expected = [1.0, 0.0, 2.0, 0.5, np.nan, 1.0, 90.0, 0.5, 100.0]
    np.testing.assert_array_equal(step_scales[0, 0, :9], expected)
    np.testing.assert_array_equal(order[0, 0, :9], [0, 2, 4, 8, 10, 12, 6, 7, 14])


def test_longest():
    codes = np.random.default_rng(0).integers(-127, 128, (2, 256, 384)).astype(np.int8)
    codes[1, 200, 128:256] = -128
    longest = triton_tools.interpreted("longest").longest(jnp.asarray(codes))
    sums = np.abs(codes.astype(int)).reshape(2, 2, 128, 3, 128).sum(4)
    np.testing.assert_array_equal(longest, sums.max((2, 3)))
    assert longest[1, 1] == 128 * 128


def compiled(shape, blocks, fallback, sm):
    (M, K, N), (m, k, n) = shape, blocks

    def operand(rows, side):
        return Quantized(
            jax.ShapeDtypeStruct((2, rows, K), jnp.int8),
            jax.ShapeDtypeStruct((2, -(-rows // side), -(-K // k)), jnp.float32),
        )

    *others, gemm = triton_tools.compile_kernels(
        "matmul",
        "matmul",
        operand(M, m),
        operand(M, m) if fallback else None,
        operand(N, n),
        capability=sm,
        sm=sm,
        block_shape=blocks,
        dtype=jnp.bfloat16,
    )
    assert all(kernel.spills == 0 for kernel in others)
    return gemm


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((4096, 4096, 4096), (128, 128, 128)),
        ((1000, 1000, 1000), (256, 256, 256)),
        ((1000, 1000, 1000), (32, 64, 32)),
    ],
)
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("sm", SHARED)
def test_compiles_to_tensor_core_products_without_spills(sm, fallback, shape, blocks):
    gemm = compiled(shape, blocks, fallback, sm)
    product = r"wgmma\.mma_async\S*s32\.s8\.s8" if sm == 90 else r"mma\.sync\S*s32\.s8"
    assert re.search(product, gemm.ptx)
    # On Hopper two programs with all the registers they may have beat three without
    # spills, although Triton's assembler spills 68 bytes of them.
    assert gemm.spills <= (72 if sm == 90 and gemm.registers == 255 else 0)
    assert gemm.shared <= SHARED[sm]
    assert ("cvt.rn.f32.s32" in gemm.ptx) == (sm > 80)
    assert "cvt.rn.bf16x2.f32" in gemm.ptx
    assert "cp.async.cg.shared.global" in gemm.ptx, "loads are not 16 bytes wide"


@pytest.mark.parametrize("fallback", [False, True])
def test_two_programs_share_a_multiprocessor_of_hopper(fallback):
    gemm = compiled((4096, 4096, 4096), (128, 128, 128), fallback, 90)
    assert 2 * 32 * gemm.num_warps * gemm.registers <= 2**16
    assert 2 * (gemm.shared + 1024) <= 228 * 1024
