"""The Triton GEMMs of rows in groups: what they compute in Triton's interpreter."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tests.kernels import grouped_cases, triton_tools
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
