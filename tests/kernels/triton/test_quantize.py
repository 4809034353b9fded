"""The quantizing Triton kernels: what they compute in Triton's interpreter."""

import inspect

import jax.numpy as jnp
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.sources import Matrix
from fbq_jax.kernels.triton import quantize_vectors, sources
from tests.kernels import quantize_cases as cases
from tests.kernels.quantize_cases import FLOAT8, near, noisy
from tests.kernels.triton_tools import interpreted
from tests.marks import with_first_fast


@pytest.fixture(scope="module")
def quantize():
    return interpreted("quantize").quantize


def first_fast(*tables):
    return [case for table in tables for case in with_first_fast(table)]


def from_fast(table, first):
    """The cases of a table from one on, which is fast, and then those before it."""
    return table[first:] + table[:first]


@pytest.mark.parametrize(
    "case",
    first_fast(
        from_fast(cases.BLOCKS, 1),
        cases.FALLBACK,
        cases.VECTORS,
        [cases.PER_TENSOR],
        cases.ROWS,
        cases.ROWS_AND_BLOCKS,
        cases.FLOAT8_BLOCKS,
        cases.FLOAT8_ROWS,
        cases.GROUPED,
        cases.GROUPED_FALLBACK,
        cases.GATHERED,
        from_fast(cases.NORMS, 1),
        cases.GATES,
        cases.GRADS,
        from_fast(cases.NORMS_IN_ROWS, 3),
        cases.GATES_IN_ROWS,
        from_fast(cases.GRADS_IN_ROWS, 1),
        cases.of_bits(9),
    )
    + with_first_fast(
        [
            *cases.GATES_OF_TILES,
            *cases.GRADS_OF_TILES,
            *[case for bits in (5, 6, 8) for case in cases.of_bits(bits)],
        ],
        0,
    ),
)
def test_matches_the_reference(quantize, case):
    cases.check(quantize, case)


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
def test_special_values(quantize, dtype):
    for case in cases.special_blocks(dtype) + cases.special_vectors(dtype):
        cases.check(quantize, case, folds=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", cases.SPECIAL_DTYPES)
def test_special_values_in_rows_in_float8_and_in_layers(quantize, dtype):
    for case in cases.special_rows(dtype) + cases.special_float8(dtype):
        cases.check(quantize, case)
    if dtype == "bfloat16":
        cases.check_special_layers(quantize, dtype)


@pytest.mark.parametrize("criterion", with_first_fast(["l1", "l1_rel"]))
def test_large_metrics(quantize, criterion):
    cases.check_large_metrics(quantize, criterion)


def test_a_shard_draws_the_noise_of_the_global_matrix(quantize):
    cases.check_global_offset(quantize)


@pytest.mark.parametrize(
    "colwise", [noisy(32, 32), near(32, 32, sums=True), noisy(32, 1)]
)
def test_float8_codes_refuse_noise_and_sums(quantize, colwise):
    operands = Matrix(jnp.ones((1, 32, 32))), cases.plain_seeds(1)
    for op in (quantize, reference.quantize):
        with pytest.raises(ValueError, match=r"^FP8 codes take nearest rounding and n"):
            op(*operands, rowwise=near(32, 32), colwise=colwise, **FLOAT8)


@pytest.mark.parametrize(
    ("rowwise", "options", "message"),
    [
        (near(32, 32), {"bound": 127.5}, "scale blocks to 127.*got bound=127.5"),
        (near(1, 32, sums=True), {}, "only blocks have sums of codes; got Layout"),
        (near(1, None), FLOAT8, "scales of whole vectors are of INT8 codes, not of fl"),
    ],
)
def test_what_no_kernel_computes_is_refused(quantize, rowwise, options, message):
    operands = Matrix(jnp.ones((1, 32, 32))), cases.plain_seeds(1)
    with pytest.raises(ValueError, match=message):
        quantize(*operands, rowwise=rowwise, colwise=None, **options)


def test_signatures_are_short():
    for module in (sources, quantize_vectors):
        for function in vars(module).values():
            if isinstance(function, sources.triton.JITFunction):
                assert len(inspect.signature(function.fn).parameters) <= 20
