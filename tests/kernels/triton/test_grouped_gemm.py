"""The Triton GEMMs of rows in groups: what they compute, and how they compile."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.compile_tools import SHARED_MEMORY
from tests.kernels import grouped_cases, triton_tools
from tests.kernels.gemm_cases import shapes
from tests.kernels.grouped_cases import CASES, ROW_CASES, SMALL_CASES

ALL_CASES = CASES | ROW_CASES | SMALL_CASES


def interpreted(sm=90):
    module = triton_tools.interpreted("grouped_gemm")
    ops = {
        name: functools.partial(getattr(module, name), sm=sm)
        for name in ("matmul", "contract")
    }
    return SimpleNamespace(**ops)


@pytest.mark.parametrize("name", grouped_cases.params(ALL_CASES))
def test_matmul_matches_float64(name):
    grouped_cases.check_matmul(interpreted().matmul, ALL_CASES[name])


@pytest.mark.parametrize("name", grouped_cases.params(ALL_CASES))
def test_contraction_matches_float64(name):
    grouped_cases.check_contract(interpreted().contract, ALL_CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["uneven, fallback", "32x32x32 blocks"])
def test_matches_float64_on_ampere(name):
    ops, case = interpreted(80), ALL_CASES[name]
    grouped_cases.check_matmul(ops.matmul, case, jnp.bfloat16)
    grouped_cases.check_contract(ops.contract, case, jnp.bfloat16)


def test_nan_stays_in_its_group():
    grouped_cases.check_nan_stays_in_its_group(interpreted())


@pytest.mark.exhaustive
@pytest.mark.parametrize("product", ["matmul", "with fallback", "contract"])
@pytest.mark.parametrize(
    ("side", "rows", "codes"),
    [(128, 128, "int8"), (32, 32, "int8"), (128, 1, "int8"), (128, 1, "float8_e4m3fn")],
)
@pytest.mark.parametrize("sm", SHARED_MEMORY)
def test_compiles_to_tensor_core_products_without_spills(
    sm, side, rows, codes, product
):
    if codes != "int8" and (sm < 89 or product == "with fallback"):
        pytest.skip("there are no such products")
    tiles, groups, size = 72, 8, 4096
    options = {"dtype": jnp.bfloat16, "sm": sm}
    if product == "contract":
        shape = tiles, size, side
        operands = shapes(shape, (rows, side), codes), shapes(shape, (side,) * 2, codes)
        options["size"] = groups
    else:
        fallback = product == "with fallback"
        operands = (
            shapes((tiles, side, size), (rows, side), codes, fallback=fallback),
            shapes((groups, size, size), (side, side), codes),
        )
    *_, gemm = triton_tools.compile_kernels(
        "grouped_gemm",
        "contract" if product == "contract" else "matmul",
        *operands,
        jax.ShapeDtypeStruct((tiles,), jnp.int32),
        capability=sm,
        **options,
    )
    products = {"int8": r"mma\S*s32\.s8", "float8_e4m3fn": r"mma\S*e4m3"}
    assert re.search(products[codes], gemm.ptx)
    assert gemm.spills == 0
    assert gemm.shared <= SHARED_MEMORY[sm]
    assert "cp.async.cg.shared.global" in gemm.ptx, "loads are not 16 bytes wide"
