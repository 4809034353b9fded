"""Triton kernels compile for GPUs that are not here."""

import importlib.util

import pytest

from tests.compile_tools import SHARED_MEMORY
from tests.kernels import compile_cases
from tests.marks import rows_with_first_fast

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which compiles kernels",
)
HOPPER = 90  # its GEMM is another one
CAPABILITIES = [capability for capability in SHARED_MEMORY if capability != HOPPER]
REPRESENTATIVE = (
    ("GEMM, blocks of 128, fallback", 80),
    ("quantize blocks of 128, fallback", 89),
)


def check_kernels(kernels, capability):
    for kernel in kernels:
        assert kernel.spills == 0, kernel.name
        assert kernel.shared <= SHARED_MEMORY[capability], kernel.name


def every_case():
    if importlib.util.find_spec("triton") is None:
        return {}
    return {case.what: case.compiled for case in compile_cases.cases()}


@needs_triton
@pytest.mark.parametrize(("what", "capability"), rows_with_first_fast(REPRESENTATIVE))
def test_kernels_fit_without_spills(what, capability):
    check_kernels(every_case()[what](capability=capability), capability)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("what", every_case())
def test_every_kernel_fits_without_spills(what, capability):
    check_kernels(every_case()[what](capability=capability), capability)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    "block_shape",
    [(32, 128, 128), (128, 128, 32), (64, 64, 64), (128, 256, 128), (256, 128, 256)],
)
def test_default_configurations_fit_without_spills(block_shape, fallback, capability):
    for sizes in ((4096, 4096, 4096), (1000, 1000, 1000), (1, 4096, 4096)):
        kernels = compile_cases.compile_gemm(
            sizes, block_shape, capability=capability, fallback=fallback
        )
        check_kernels(kernels, capability)
