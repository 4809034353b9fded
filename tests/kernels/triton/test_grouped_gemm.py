"""The Triton GEMMs of rows in groups: what they compute, and how they compile."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels.reference import Quantized
from tests.kernels import grouped_cases, triton_tools
from tests.kernels.grouped_cases import CASES, SMALL_CASES
from tests.kernels.triton.test_gemm import SHARED

ALL_CASES = CASES | SMALL_CASES
NAMES = "ragged_matmul", "ragged_contraction"


def interpreted(sm=90):
    module = triton_tools.interpreted("grouped_gemm")
    ops = {name: functools.partial(getattr(module, name), sm=sm) for name in NAMES}
    return SimpleNamespace(**ops)


@pytest.mark.parametrize("name", grouped_cases.params(ALL_CASES))
def test_matmul_matches_float64(name):
    grouped_cases.check_matmul(interpreted().ragged_matmul, ALL_CASES[name])


@pytest.mark.parametrize("name", grouped_cases.params(ALL_CASES))
def test_contraction_matches_float64(name):
    grouped_cases.check_contraction(interpreted().ragged_contraction, ALL_CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["uneven, fallback", "32x32x32 blocks"])
def test_matches_float64_on_ampere(name):
    ops, case = interpreted(80), ALL_CASES[name]
    grouped_cases.check_matmul(ops.ragged_matmul, case, jnp.bfloat16)
    grouped_cases.check_contraction(ops.ragged_contraction, case, jnp.bfloat16)


def test_nan_stays_in_its_group():
    grouped_cases.check_nan_stays_in_its_group(interpreted())


@pytest.mark.exhaustive
@pytest.mark.parametrize("product", ["matmul", "with fallback", "contraction"])
@pytest.mark.parametrize("side", [128, 32])
@pytest.mark.parametrize("sm", SHARED)
def test_compiles_to_tensor_core_products_without_spills(sm, side, product):
    tiles, groups, size = 72, 8, 4096

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def operand(*shape):
        scales = shape[0], *(-(-length // side) for length in shape[1:])
        return Quantized(array(shape, jnp.int8), array(scales, jnp.float32))

    options = {"block_shape": (side,) * 3, "dtype": jnp.bfloat16, "sm": sm}
    if product == "contraction":
        operands = (operand(tiles, size, side),) * 2
        name, options = "ragged_contraction", options | {"size": groups}
    else:
        lhs = operand(tiles, side, size)
        residual = lhs if product == "with fallback" else None
        name, operands = "ragged_matmul", (lhs, residual, operand(groups, size, size))
    *_, gemm = triton_tools.compile_kernels(
        "grouped_gemm",
        name,
        *operands,
        array((tiles,), jnp.int32),
        capability=sm,
        **options,
    )
    assert re.search(r"mma\S*s32\.s8", gemm.ptx)
    assert gemm.spills == 0
    assert gemm.shared <= SHARED[sm]
    assert "cp.async.cg.shared.global" in gemm.ptx, "loads are not 16 bytes wide"
