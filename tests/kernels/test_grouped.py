"""The ops on tiles of groups: the reference, and kernels in their interpreters."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.tpu import gemm as tpu_gemm
from fbq_jax.kernels.tpu import grouped as tpu_grouped
from tests.kernels import grouped_cases, triton_tools
from tests.kernels.grouped_cases import CASES, ROW_CASES, SMALL_CASES
from tests.kernels.tpu_tools import interpreted, jitted  # noqa: F401 (a fixture)


def triton(sm=90):
    module = triton_tools.interpreted("grouped_gemm")
    ops = {"matmul": module.matmul, "contract": module.contract}
    return SimpleNamespace(**{n: functools.partial(op, sm=sm) for n, op in ops.items()})


def of_reference():
    contract = jax.jit(reference.contract, static_argnames=("size", "dtype"))
    matmul = jax.jit(reference.matmul, static_argnames="dtype")
    return SimpleNamespace(matmul=matmul, contract=contract)


def tpu():
    matmul, contract = jitted(tpu_gemm.matmul), jitted(tpu_grouped.contract)
    return SimpleNamespace(matmul=matmul, contract=contract)


EVERY_CASE = CASES | ROW_CASES | SMALL_CASES
BACKENDS = {of_reference: CASES | ROW_CASES, triton: EVERY_CASE, tpu: CASES}
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, *param.values, marks=param.marks)
        for backend, names in BACKENDS.items()
        for param in grouped_cases.params(names)
    ],
)
def test_products_match_float64(backend, name):
    grouped_cases.check_matmul(backend().matmul, EVERY_CASE[name])
    grouped_cases.check_contract(backend().contract, EVERY_CASE[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ops", "name"),
    [
        (tpu, "uneven, fallback"),
        (functools.partial(triton, sm=80), "uneven, fallback"),
        (functools.partial(triton, sm=80), "32x32x32 blocks"),
    ],
)
def test_sums_are_rounded_once(ops, name):
    grouped_cases.check_matmul(ops().matmul, EVERY_CASE[name], jnp.bfloat16)
    grouped_cases.check_contract(ops().contract, EVERY_CASE[name], jnp.bfloat16)


@pytest.mark.exhaustive
def test_several_tiles_of_a_contraction_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu_gemm, "_MAX_ROWS", 128)
    monkeypatch.setattr(tpu_gemm, "_MAX_COLUMNS", 256)
    grouped_cases.check_contract(tpu().contract, EVERY_CASE["uneven, fallback"])


@pytest.mark.parametrize(
    "backend", [of_reference, triton, pytest.param(tpu, marks=pytest.mark.exhaustive)]
)
def test_nan_stays_in_its_group(backend):
    grouped_cases.check_nan_stays_in_its_group(backend())
