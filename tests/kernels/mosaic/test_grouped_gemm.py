"""The Mosaic GEMMs of rows in groups: what they compute, and how they compile."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels.mosaic import grouped_gemm
from fbq_jax.kernels.mosaic.gemm_problem import Config
from tests.gpus import needs_compiler
from tests.kernels import grouped_cases, mosaic_tools
from tests.kernels.gemm_cases import shapes
from tests.kernels.grouped_cases import CASES, ROW_CASES
from tests.kernels.mosaic.test_gemm import (
    PRODUCTS,
    build_in_parts,
    check_kernel,
    interpreted_kernels,
    replace_triton_kernels,
)

ALL_CASES = CASES | ROW_CASES


@pytest.fixture
def ops(monkeypatch):
    """The interpreted ops."""
    interpreted_kernels(monkeypatch)
    matmul, contract = (
        functools.partial(mosaic_tools.interpret, op)
        for op in (grouped_gemm.matmul, grouped_gemm.contract)
    )
    return SimpleNamespace(matmul=matmul, contract=contract)


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", grouped_cases.params(ALL_CASES))
def test_matmul_matches_float64(ops, name, dtype):
    grouped_cases.check_matmul(ops.matmul, ALL_CASES[name], dtype)


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", grouped_cases.params(ALL_CASES))
def test_contraction_matches_float64(ops, name, dtype):
    grouped_cases.check_contract(ops.contract, ALL_CASES[name], dtype)


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("wide", [0, 2, 3])
@pytest.mark.parametrize("name", ["uneven, fallback", "scales of rows"])
def test_every_width_matches_float64(ops, name, wide):
    check_width(ops, wide, name)


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("wide", [0, 2])
def test_tiles_in_parts_match_float64(ops, monkeypatch, wide):
    problems = build_in_parts(monkeypatch)
    check_width(ops, wide)
    assert min(problem.num_parts for problem in problems) > 1


def check_width(ops, wide, name="uneven, fallback"):
    case = ALL_CASES[name]._replace(matrix=(130, 450))
    config = Config(1, wide)
    matmul = functools.partial(ops.matmul, config=config)
    grouped_cases.check_matmul(matmul, case)
    contract = functools.partial(ops.contract, config=config)
    grouped_cases.check_contract(contract, case)


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
def test_nan_stays_in_its_group(ops):
    grouped_cases.check_nan_stays_in_its_group(ops)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("wide", [0, 16, 32])
@pytest.mark.parametrize("product", ["matmul", "with fallback", "contract"])
def test_compiles_to_wgmma_without_spills(monkeypatch, product, wide, dtype):
    check_compiled(monkeypatch, product, dtype, Config(8, wide))


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("side", [128, 1])
@pytest.mark.parametrize("product", ["matmul", "contract"])
def test_scales_of_rows_compile_without_spills(
    monkeypatch, product, side, codes, dtype
):
    config = Config(8, 16 if side == 128 else 0)
    check_compiled(monkeypatch, product, dtype, config, (1, side), codes)


def check_compiled(monkeypatch, product, dtype, config, sides=(128, 128), codes="int8"):
    """Rows of ``sides`` share a scale in lhs and in rhs."""
    replace_triton_kernels(monkeypatch)
    (tiles, groups, size), (m, n) = (72, 8, 4096), sides
    options = {"dtype": dtype, "config": config}
    if product == "contract":
        function = functools.partial(grouped_gemm.contract, size=groups, **options)
        operands = [shapes((tiles, size, 128), (r, 128), codes) for r in sides]
    else:
        function = functools.partial(grouped_gemm.matmul, **options)
        fallback = product == "with fallback"
        operands = [
            shapes((tiles, 128, size), (m, 128), codes, fallback=fallback),
            shapes((groups, size, size), (n, 128), codes),
        ]
    index = jax.ShapeDtypeStruct((tiles,), jnp.int32)
    (kernel,) = mosaic_tools.compile_kernels(function, *operands, index)
    check_kernel(kernel, PRODUCTS[codes])
