"""The ops on tiles of groups for TPUs, interpreted."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from fbq_jax.kernels.tpu import gemm, grouped
from tests.kernels import grouped_cases
from tests.kernels.grouped_cases import CASES
from tests.kernels.tpu_tools import interpreted, jitted  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("interpreted")
OPS = SimpleNamespace(matmul=jitted(gemm.matmul), contract=jitted(grouped.contract))


@pytest.mark.parametrize("name", grouped_cases.params(CASES))
def test_matmul_matches_float64(name):
    grouped_cases.check_matmul(OPS.matmul, CASES[name])


@pytest.mark.parametrize("name", grouped_cases.params(CASES))
def test_contraction_matches_float64(name):
    grouped_cases.check_contract(OPS.contract, CASES[name])


@pytest.mark.exhaustive
def test_sums_are_rounded_once():
    case = CASES["uneven, fallback"]
    grouped_cases.check_matmul(OPS.matmul, case, jnp.bfloat16)
    grouped_cases.check_contract(OPS.contract, case, jnp.bfloat16)


@pytest.mark.exhaustive
def test_several_tiles_of_a_contraction(monkeypatch):
    monkeypatch.setattr(gemm, "_MAX_ROWS", 128)
    monkeypatch.setattr(gemm, "_MAX_COLUMNS", 256)
    grouped_cases.check_contract(OPS.contract, CASES["uneven, fallback"])


@pytest.mark.exhaustive
def test_nan_stays_in_its_group():
    grouped_cases.check_nan_stays_in_its_group(OPS)
