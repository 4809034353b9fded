"""The fused Triton kernels: their numbers, and what they compile to."""

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels import packing
from tests.kernels import producer_cases as cases
from tests.kernels.test_triton_quantize import check_kernels
from tests.kernels.triton_tools import compile_kernels, interpreted


@pytest.fixture(scope="module")
def ops():
    return interpreted("producers")


@pytest.mark.parametrize("case", cases.QUANTIZE)
def test_rms_norm_quantize(ops, case):
    cases.check_norm(ops, *case)


@pytest.mark.parametrize("case", cases.QUANTIZE)
def test_silu_gate_quantize(ops, case):
    cases.check_gate(ops, *case)


@pytest.mark.parametrize("case", cases.GRAD)
def test_silu_gate_grad_quantize(ops, case):
    cases.check_grad(ops, *case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_special_values(ops, dtype):
    cases.check_special(ops, dtype)
