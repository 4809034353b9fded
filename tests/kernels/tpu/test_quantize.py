"""The quantizing TPU kernels, interpreted: they are the reference, bit for bit."""

import jax.numpy as jnp
import pytest

from fbq_jax.kernels.sources import Matrix
from fbq_jax.kernels.tpu import quantize as module
from fbq_jax.kernels.tpu import quantize_vectors
from tests.kernels import quantize_cases as cases
from tests.kernels.quantize_cases import FLOAT8, Case, matrix, near, noisy
from tests.kernels.tpu_tools import interpreted, jitted  # noqa: F401 (a fixture)
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")
SIDES = {128, 256, None}
quantize = jitted(module.quantize)


def supported(*tables, fast=1):
    """The cases with blocks of these sides, of which each table's first is fast."""
    return [
        case
        for table in tables
        for case in with_first_fast(
            (case.with_sums(False) for case in table if case.sides <= SIDES), fast
        )
    ]


@pytest.mark.parametrize(
    "case",
    [
        *supported(cases.BLOCKS, cases.FALLBACK, cases.GROUPED),
        *supported(cases.GROUPED_FALLBACK, cases.GATES, cases.GRADS),
        *with_first_fast([*cases.VECTORS, cases.GATHERED[1]]),
        *supported(cases.NORMS, cases.GATES_OF_TILES, cases.GRADS_OF_TILES, fast=0),
    ],
)
def test_matches_the_reference(case):
    cases.check(quantize, case)


def test_several_stripes(monkeypatch):
    monkeypatch.setattr(module, "_MAX_BLOCKS", 2)
    x = matrix((1, 130, 600), "bfloat16")
    cases.check(quantize, Case(x, noisy(128, 128), noisy(128, 128)))


@pytest.mark.parametrize("columns", [384, 300])
def test_the_last_tile_of_a_row_may_extend_beyond_the_matrix(monkeypatch, columns):
    """By whole slices of 128 columns, or by part of one, too."""
    monkeypatch.setattr(quantize_vectors, "_COLUMNS", 256)
    x = matrix((1, 40, columns), "float32")
    cases.check(quantize, Case(x, near(1, None), noisy(None, 1)))
    cases.check(quantize, cases.PER_TENSOR._replace(source=x))


@pytest.mark.exhaustive
def test_vectors_of_several_tiles(monkeypatch):
    monkeypatch.setattr(quantize_vectors, "_COLUMNS", 128)
    monkeypatch.setattr(quantize_vectors, "_ROWS", 32)
    cases.check(quantize, cases.PER_TENSOR)
    x = matrix((2, 70, 300), "float32")
    cases.check(quantize, Case(x, near(1, None), noisy(None, 1)))


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
def test_special_values(dtype):
    blocks = [case.with_sums(False) for case in cases.special_blocks(dtype, (128, 128))]
    for case in cases.special_vectors(dtype) + blocks:
        cases.check(quantize, case, folds=False)


@pytest.mark.parametrize("criterion", with_first_fast(["l1", "l1_rel"]))
def test_large_metrics(criterion):
    cases.check_large_metrics(quantize, criterion, block=(128, 128))


@pytest.mark.parametrize(
    ("rowwise", "options", "message"),
    [
        (near(128, 128, sums=True), {}, "INT8 codes without sums"),
        (near(1, 128), {}, "with scales of blocks or of vectors"),
        (near(128, 128), FLOAT8, "got dtype='float8_e4m3fn'"),
        (near(128, 128), {"bound": 127.5}, "scale blocks to 127.*got bound=127.5"),
    ],
)
def test_what_no_kernel_computes_is_refused(rowwise, options, message):
    operands = Matrix(jnp.ones((1, 128, 128))), cases.plain_seeds(1), None
    with pytest.raises(ValueError, match=message):
        quantize(*operands, rowwise=rowwise, colwise=None, **options)
