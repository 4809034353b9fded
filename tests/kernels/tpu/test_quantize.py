"""The quantizing TPU kernels, interpreted: they are the reference, bit for bit."""

import pytest

from fbq_jax.kernels.tpu import quantize, quantize_vectors
from fbq_jax.ops.backends import TPU_SIDES
from tests.kernels import quantize_cases as cases
from tests.kernels.test_reference import heavy
from tests.kernels.tpu_tools import interpreted, jitted_ops  # noqa: F401 (a fixture)
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCKS, VECTORS = jitted_ops(quantize), jitted_ops(quantize_vectors)


def supported(blocked):
    return [case for case in blocked if set(case[2]) <= set(TPU_SIDES)]


@pytest.mark.parametrize("case", with_first_fast(supported(cases.QUANTIZE)))
def test_quantize(case):
    shape, dtype, *options = case
    cases.check_quantize(BLOCKS, heavy(shape, dtype=dtype), *options, sums=False)


@pytest.mark.parametrize("case", with_first_fast(supported(cases.FALLBACK)))
def test_fallback(case):
    shape, dtype, *options = case
    cases.check_fallback(BLOCKS, heavy(shape, dtype=dtype), *options)


def test_several_stripes(monkeypatch):
    monkeypatch.setattr(quantize, "_MAX_BLOCKS", 2)
    x = heavy((1, 130, 600), dtype="bfloat16")
    cases.check_quantize(BLOCKS, x, (128, 128), "stochastic", "stochastic", sums=False)


@pytest.mark.parametrize("case", with_first_fast(cases.VECTORS))
def test_vectors(case):
    shape, dtype, *options = case
    cases.check_vectors(VECTORS, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("columns", [384, 300])
def test_the_last_tile_of_a_row_may_extend_beyond_the_matrix(monkeypatch, columns):
    """By whole slices of 128 columns, or by part of one, too."""
    monkeypatch.setattr(quantize_vectors, "_COLUMNS", 256)
    x = heavy((1, 40, columns))
    cases.check_vectors(VECTORS, x, "nearest", "stochastic")
    cases.check_per_tensor_scale(VECTORS, x)


@pytest.mark.exhaustive
def test_vectors_of_several_tiles(monkeypatch):
    monkeypatch.setattr(quantize_vectors, "_COLUMNS", 128)
    monkeypatch.setattr(quantize_vectors, "_ROWS", 32)
    cases.check_per_tensor_scale(VECTORS, heavy((2, 70, 141)))
    cases.check_vectors(VECTORS, heavy((2, 70, 300)), "nearest", "stochastic")


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
def test_special_blocks(dtype):
    cases.check_special_vectors(VECTORS, dtype)
    cases.check_special(BLOCKS, dtype, block=(128, 128), sums=False)


@pytest.mark.parametrize("criterion", with_first_fast(["l1", "l1_rel"]))
def test_large_metrics(criterion):
    cases.check_large_metrics(BLOCKS, criterion, block=(128, 128))
