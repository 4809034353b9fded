"""The quantizing kernels, interpreted: they are the reference, bit for bit."""

import inspect

import jax.numpy as jnp
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.sources import Matrix
from fbq_jax.kernels.tpu import quantize as tpu_module
from fbq_jax.kernels.tpu import quantize_vectors as tpu_vectors
from fbq_jax.kernels.triton import quantize_vectors, sources
from tests.kernels import quantize_cases as cases
from tests.kernels import triton_tools
from tests.kernels.quantize_cases import FLOAT8, WIDE, Case, matrix, near, noisy
from tests.kernels.tpu_tools import interpreted, jitted  # noqa: F401 (a fixture)
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")
tpu = jitted(tpu_module.quantize)


def triton(*operands, **options):
    return triton_tools.interpreted("quantize").quantize(*operands, **options)


def first_fast(*tables):
    return [case for table in tables for case in with_first_fast(table)]


def from_fast(table, first):
    """The cases of a table from one on, which is fast, and then those before it."""
    return table[first:] + table[:first]


@pytest.mark.parametrize(
    "case",
    first_fast(
        *(
            from_fast(cases.BLOCKS, 1),
            cases.FALLBACK,
            cases.VECTORS,
            [cases.PER_TENSOR],
        ),
        *(cases.ROWS, cases.ROWS_AND_BLOCKS, cases.FLOAT8_BLOCKS, cases.FLOAT8_ROWS),
        *(cases.GROUPED, cases.GROUPED_FALLBACK),
        *(cases.GROUPED_ROWS, cases.GATHERED),
        *(from_fast(cases.NORMS, 1), cases.GATES, cases.GRADS, cases.of_bits(9)),
        *(from_fast(cases.NORMS_IN_ROWS, 3), cases.GATES_IN_ROWS),
        from_fast(cases.GRADS_IN_ROWS, 1),
    )
    + with_first_fast([*cases.GATES_OF_TILES, *cases.GRADS_OF_TILES], 0)
    + with_first_fast([case for bits in (5, 6, 8) for case in cases.of_bits(bits)], 0),
)
def test_triton_matches_the_reference(case):
    cases.check(triton, case)


def supported(*tables, fast=1):
    """The cases that a TPU has a kernel for, of which each table's first is fast."""
    return [
        case
        for table in tables
        for case in with_first_fast(
            (c.with_sums(False) for c in table if c.sides <= {128, 256, None}), fast
        )
    ]


@pytest.mark.parametrize(
    "case",
    [
        *supported(cases.BLOCKS, cases.FALLBACK, cases.GROUPED),
        *supported(cases.GROUPED_FALLBACK, cases.GATES, cases.GRADS),
        *with_first_fast([*cases.VECTORS, *cases.GATHERED]),
        *supported(cases.NORMS, cases.GATES_OF_TILES, cases.GRADS_OF_TILES, fast=0),
    ],
)
def test_a_tpu_matches_the_reference(case):
    cases.check(tpu, case)


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
@pytest.mark.parametrize(
    ("quantize", "side", "sums"), [(triton, (32, 64), True), (tpu, (128, 128), False)]
)
def test_special_values(quantize, side, sums, dtype):
    blocks = [
        case if sums else case.with_sums(False)
        for case in cases.special_blocks(dtype, side)
    ]
    for case in blocks + cases.special_vectors(dtype):
        cases.check(quantize, case, folds=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", cases.SPECIAL_DTYPES)
def test_special_values_in_rows_in_float8_and_in_layers(dtype):
    for case in cases.special_rows(dtype) + cases.special_float8(dtype):
        cases.check(triton, case)
    if dtype == "bfloat16":
        cases.check_special_layers(triton, dtype)


@pytest.mark.parametrize("criterion", with_first_fast(["l1", "l1_rel"]))
@pytest.mark.parametrize(("quantize", "side"), [(triton, 64), (tpu, 128)])
def test_large_metrics(quantize, side, criterion):
    cases.check_large_metrics(quantize, criterion, (side, side))


def test_a_shard_draws_the_noise_of_the_global_matrix():
    cases.check_global_offset(triton)


@pytest.mark.parametrize(
    "colwise", [noisy(32, 32), near(32, 32, sums=True), noisy(32, 1)]
)
def test_float8_codes_refuse_noise_and_sums(colwise):
    operands = Matrix(jnp.ones((1, 32, 32))), cases.plain_seeds(1)
    for op in (triton, reference.quantize):
        with pytest.raises(ValueError, match=r"^FP8 codes take nearest rounding and n"):
            op(*operands, rowwise=near(32, 32), colwise=colwise, **FLOAT8)


@pytest.mark.parametrize(
    ("quantize", "rowwise", "options", "message"),
    [
        (triton, near(32, 32), WIDE, "scale blocks to 127.*got bound=127.5"),
        (triton, near(1, 32, sums=True), {}, "only blocks have sums of codes; got Lay"),
        (triton, near(1, None), FLOAT8, "scales of whole vectors are of INT8 codes, n"),
        (tpu, near(128, 128, sums=True), {}, "INT8 codes without sums"),
        (tpu, near(1, 128), {}, "with scales of blocks or of vectors"),
        (tpu, near(128, 128), FLOAT8, "got dtype='float8_e4m3fn'"),
        (tpu, near(128, 128), WIDE, "scale blocks to 127.*got bound=127.5"),
    ],
)
def test_what_no_kernel_computes_is_refused(quantize, rowwise, options, message):
    operands = Matrix(jnp.ones((1, 128, 128))), cases.plain_seeds(1), None
    with pytest.raises(ValueError, match=message):
        quantize(*operands, rowwise=rowwise, colwise=None, **options)


@pytest.mark.parametrize(
    ("settings", "shape"),
    rows_with_first_fast(
        [
            # By whole slices of 128 columns, or by part of one, too.
            ({"_COLUMNS": 256}, (1, 40, 384)),
            ({"_COLUMNS": 256}, (1, 40, 300)),
            ({"_COLUMNS": 128, "_ROWS": 32}, (2, 70, 300)),
        ],
        2,
    ),
)
def test_vectors_of_several_tiles_on_a_tpu(monkeypatch, settings, shape):
    """The last tile of a row may extend beyond the matrix."""
    for name, size in settings.items():
        monkeypatch.setattr(tpu_vectors, name, size)
    x = matrix(shape, "float32")
    cases.check(tpu, Case(x, near(1, None), noisy(None, 1)))
    cases.check(tpu, cases.PER_TENSOR._replace(source=x))


def test_several_stripes_on_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu_module, "_MAX_BLOCKS", 2)
    x = matrix((1, 130, 600), "bfloat16")
    cases.check(tpu, Case(x, noisy(128, 128), noisy(128, 128)))


def test_signatures_are_short():
    for module in (sources, quantize_vectors):
        for function in vars(module).values():
            if isinstance(function, sources.triton.JITFunction):
                assert len(inspect.signature(function.fn).parameters) <= 20
