"""The Mosaic GEMMs of rows in groups: what they compute, and how they compile."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels.mosaic import grouped_gemm
from fbq_jax.kernels.mosaic.gemm_problem import Config
from fbq_jax.kernels.reference import Quantized
from tests.gpus import needs_compiler
from tests.kernels import grouped_cases, mosaic_tools
from tests.kernels.grouped_cases import CASES
from tests.kernels.mosaic.test_gemm import (
    SHARED,
    build_in_parts,
    interpreted_kernels,
    replace_triton_kernels,
)


@pytest.fixture
def ops(monkeypatch):
    """The interpreted ops."""
    interpreted_kernels(monkeypatch)
    names = "ragged_matmul", "ragged_contraction"
    return SimpleNamespace(
        **{
            name: functools.partial(mosaic_tools.interpret, getattr(grouped_gemm, name))
            for name in names
        }
    )


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", grouped_cases.params(CASES))
def test_matmul_matches_float64(ops, name, dtype):
    grouped_cases.check_matmul(ops.ragged_matmul, CASES[name], dtype)


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", grouped_cases.params(CASES))
def test_contraction_matches_float64(ops, name, dtype):
    grouped_cases.check_contraction(ops.ragged_contraction, CASES[name], dtype)


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("wide", [0, 2, 3])
def test_every_width_matches_float64(ops, wide):
    check_width(ops, wide)


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("wide", [0, 2])
def test_tiles_in_parts_match_float64(ops, monkeypatch, wide):
    problems = build_in_parts(monkeypatch)
    check_width(ops, wide)
    assert min(problem.num_parts for problem in problems) > 1


def check_width(ops, wide):
    case = CASES["uneven, fallback"]._replace(matrix=(130, 450))
    config = Config(1, wide)
    matmul = functools.partial(ops.ragged_matmul, config=config)
    grouped_cases.check_matmul(matmul, case)
    contraction = functools.partial(ops.ragged_contraction, config=config)
    grouped_cases.check_contraction(contraction, case)


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
def test_nan_stays_in_its_group(ops):
    grouped_cases.check_nan_stays_in_its_group(ops)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("wide", [0, 16, 32])
@pytest.mark.parametrize("product", ["matmul", "with fallback", "contraction"])
def test_compiles_to_wgmma_without_spills(monkeypatch, product, wide, dtype):
    replace_triton_kernels(monkeypatch)
    tiles, groups, size = 72, 8, 4096

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def operand(*shape):
        scales = shape[0], *(side // 128 for side in shape[1:])
        return Quantized(array(shape, jnp.int8), array(scales, jnp.float32))

    options = {"block_shape": (128,) * 3, "dtype": dtype, "config": Config(8, wide)}
    if product == "contraction":
        function = functools.partial(
            grouped_gemm.ragged_contraction, size=groups, **options
        )
        operands = (operand(tiles, size, 128),) * 2
    else:
        function = functools.partial(grouped_gemm.ragged_matmul, **options)
        lhs = operand(tiles, 128, size)
        residual = lhs if product == "with fallback" else None
        operands = lhs, residual, operand(groups, size, size)
    (kernel,) = mosaic_tools.compile_kernels(
        function, *operands, array((tiles,), jnp.int32)
    )
    assert re.search(r"wgmma\.mma_async\S*s32\.s8\.s8", kernel.ptx)
    assert kernel.spills == 0
    assert kernel.shared <= SHARED
    assert "serializ" not in kernel.log.lower()
