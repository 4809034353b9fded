"""Fused ops on TPUs: their definitions, with the interpreted kernels."""

import pytest

from fbq_jax.kernels.tpu import fused
from fbq_jax.ops.backends import TPU_SIDES
from tests.kernels import fused_cases as cases
from tests.kernels.tpu_tools import interpreted, jitted_ops  # noqa: F401 (a fixture)
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")
OPS = jitted_ops(fused)
QUANTIZE = [case for case in cases.QUANTIZE if set(case[3]) <= set(TPU_SIDES)]
GRAD = [case for case in cases.GRAD if set(case[3]) <= set(TPU_SIDES)]
QUANTIZE_TILES = [
    row for row in cases.QUANTIZE_TILES if set(row[0][3]) <= set(TPU_SIDES)
]
GRAD_TILES = [row for row in cases.GRAD_TILES if set(row[0][3]) <= set(TPU_SIDES)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", with_first_fast(QUANTIZE))
def test_norm(case):
    cases.check_norm(OPS, *case)


@pytest.mark.parametrize("case", with_first_fast(QUANTIZE))
def test_gate(case):
    cases.check_gate(OPS, *case)


@pytest.mark.parametrize("case", with_first_fast(GRAD))
def test_gradient_of_the_gate(case):
    cases.check_grad(OPS, *case, sums=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "row_counts", "interleaved"), QUANTIZE_TILES)
def test_gate_of_tiles(case, row_counts, interleaved):
    cases.check_gate(OPS, *case, row_counts, interleaved)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "row_counts", "interleaved"), GRAD_TILES)
def test_gradient_of_the_gate_of_tiles(case, row_counts, interleaved):
    cases.check_grad(OPS, *case, row_counts, interleaved, sums=False)
