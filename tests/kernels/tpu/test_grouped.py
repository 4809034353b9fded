"""The ops of rows in groups for TPUs, interpreted."""

import jax.numpy as jnp
import pytest

from fbq_jax.kernels.tpu import grouped
from fbq_jax.ops.backends import TPU_SIDES
from tests.kernels import grouped_cases
from tests.kernels.grouped_cases import CASES
from tests.kernels.tpu_tools import interpreted, jitted_ops  # noqa: F401 (a fixture)
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")
OPS = jitted_ops(grouped)
QUANTIZE = [case for case in grouped_cases.QUANTIZE if set(case[4]) <= set(TPU_SIDES)]
FALLBACK = [case for case in grouped_cases.FALLBACK if set(case[4]) <= set(TPU_SIDES)]


@pytest.mark.parametrize("name", grouped_cases.params(CASES))
def test_matmul_matches_float64(name):
    grouped_cases.check_matmul(OPS.ragged_matmul, CASES[name])


@pytest.mark.parametrize("name", grouped_cases.params(CASES))
def test_contraction_matches_float64(name):
    grouped_cases.check_contraction(OPS.ragged_contraction, CASES[name])


@pytest.mark.exhaustive
def test_sums_are_rounded_once():
    case = CASES["uneven, fallback"]
    grouped_cases.check_matmul(OPS.ragged_matmul, case, jnp.bfloat16)
    grouped_cases.check_contraction(OPS.ragged_contraction, case, jnp.bfloat16)


@pytest.mark.exhaustive
def test_several_tiles_of_a_contraction(monkeypatch):
    monkeypatch.setattr(grouped, "_MAX_ROWS", 128)
    monkeypatch.setattr(grouped, "_MAX_COLUMNS", 256)
    case = CASES["uneven, fallback"]
    grouped_cases.check_contraction(OPS.ragged_contraction, case)


@pytest.mark.exhaustive
def test_nan_stays_in_its_group():
    grouped_cases.check_nan_stays_in_its_group(OPS)


@pytest.mark.parametrize("case", with_first_fast(QUANTIZE))
def test_quantize(case):
    grouped_cases.check_quantize(OPS, *case, sums=False)


@pytest.mark.parametrize("case", with_first_fast(FALLBACK))
def test_fallback(case):
    grouped_cases.check_fallback(OPS, *case)
