"""The quantizing Triton kernels: their results, and their compiled code."""

import functools
import inspect
import re

import jax.numpy as jnp
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.sources import Matrix
from fbq_jax.kernels.triton import quantize_vectors, sources
from tests.compile_tools import SHARED_MEMORY
from tests.kernels import quantize_cases as cases
from tests.kernels.compile_cases import (
    compile_quantize,
    gate,
    gate_grad,
    matrix,
    norm,
)
from tests.kernels.quantize_cases import FLOAT8, near, noisy
from tests.kernels.triton_tools import interpreted
from tests.marks import with_first_fast


@pytest.fixture(scope="module")
def quantize():
    return interpreted("quantize").quantize


def first_fast(*tables):
    return [case for table in tables for case in with_first_fast(table)]


@pytest.mark.parametrize(
    "case",
    first_fast(
        cases.BLOCKS[1:] + cases.BLOCKS[:1],
        cases.FALLBACK,
        cases.VECTORS,
        [cases.PER_TENSOR],
        cases.ROWS[:6],
        cases.ROWS[6:],
        cases.WITH_FLOAT8[:3],
        cases.WITH_FLOAT8[3:],
        cases.GROUPED[:5],
        cases.GROUPED[5:],
        cases.GATHERED,
        cases.NORMS[1:] + cases.NORMS[:1],
        cases.GATES,
        cases.GRADS,
        cases.NORMS_IN_ROWS[3:] + cases.NORMS_IN_ROWS[:3],
        cases.GATES_IN_ROWS,
        cases.GRADS_IN_ROWS[1:] + cases.GRADS_IN_ROWS[:1],
        cases.of_bits(9),
    ),
)
def test_matches_the_reference(quantize, case):
    cases.check(quantize, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        *cases.GATES_OF_TILES,
        *cases.GRADS_OF_TILES,
        *[case for bits in (5, 6, 8) for case in cases.of_bits(bits)],
    ],
)
def test_tiles_and_other_bits_match_the_reference(quantize, case):
    cases.check(quantize, case)


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
def test_special_values(quantize, dtype):
    for case in cases.special_blocks(dtype) + cases.special_vectors(dtype):
        cases.check(quantize, case, folds=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", cases.SPECIAL_DTYPES)
def test_special_values_in_rows_and_in_float8(quantize, dtype):
    for case in cases.special_rows(dtype) + cases.special_float8(dtype):
        cases.check(quantize, case)


@pytest.mark.exhaustive
def test_special_values_of_layers(quantize):
    cases.check_special_layers(quantize, "bfloat16")


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


# The compiled code.

SHAPE = (1, 4096, 4096)


def check_kernels(kernels, capability):
    """Kernels do not spill; loads and stores take 16 bytes at once."""
    for kernel in kernels:
        assert kernel.spills == 0, kernel.name
        assert kernel.shared <= SHARED_MEMORY[capability], kernel.name
        assert "ld.global.v4" in kernel.ptx
        assert "st.global.v4" in kernel.ptx or kernel.name == "_find_maxima"


# The usual block in two types, the smallest, the narrowest and the largest.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "block", "criterion"),
    [
        (90, "bfloat16", (128, 128), "absmax"),
        (80, "float32", (128, 128), "l1_rel"),
        (90, "bfloat16", (32, 32), "l1"),
        (89, "float32", (256, 32), "absmax"),
        (80, "float32", (256, 256), "l1_rel"),
    ],
)
def test_blocks_compile_without_spills(capability, dtype, block, criterion):
    compiled = functools.partial(
        compile_quantize, matrix(SHAPE, dtype), capability=capability
    )
    check_kernels(compiled(noisy(*block), near(*block)), capability)
    fallback = compiled(near(*block), noisy(*block), criterion=criterion)
    check_kernels(fallback, capability)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "rowwise", "colwise", "bound"),
    [
        (90, "bfloat16", noisy(1, None), noisy(None, 1), 127.5),
        (90, "bfloat16", None, noisy(None, 1), 127.0),
        (89, "float16", noisy(1, None), None, 127.0),
        (80, "float32", near(1, None), near(None, 1), 127.0),
    ],
)
def test_vectors_compile_without_spills(capability, dtype, rowwise, colwise, bound):
    kernels = compile_quantize(
        matrix(SHAPE, dtype), rowwise, colwise, bound=bound, capability=capability
    )
    assert len(kernels) == 2
    check_kernels(kernels, capability)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (256, 128)])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_rows_compile_without_spills(capability, dtype, block, in_blocks):
    r, c = block
    colwise = noisy(r, c, sums=True) if in_blocks else noisy(r, 1)
    kernels = compile_quantize(
        matrix(SHAPE, dtype), noisy(1, c), colwise, capability=capability
    )
    check_kernels(kernels, capability)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        pytest.param(89, "float32", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "layouts",
    with_first_fast([(near(1, 128), near(128, 1)), (near(128, 128), near(128, 128))]),
)
def test_float8_compiles_without_spills(layouts, capability, dtype):
    kernels = compile_quantize(
        matrix(SHAPE, dtype), *layouts, capability=capability, **FLOAT8
    )
    check_kernels(kernels, capability)
    # Rounded once, from float32.
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernels[0].ptx
    assert "e4m3x2.f16x2" not in kernels[0].ptx


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "bits", "block", "criterion"),
    [
        (90, "bfloat16", 10, (128, 128), "absmax"),
        (89, "float16", 12, (32, 128), None),
        (80, "float32", 11, (256, 128), "l1_rel"),
    ],
)
def test_layers_compile_without_spills(capability, dtype, bits, block, criterion):
    r, c = block
    args, fallback = (SHAPE, dtype, bits), {"criterion": criterion}
    forward, backward = (near(r, c), noisy(r, c)), (noisy(r, c), noisy(r, c))
    in_rows, summed = (near(1, c), noisy(r, 1)), (noisy(1, c), noisy(r, c, sums=True))
    calls = [
        (norm(*args), forward, fallback),
        (gate(*args), forward, fallback),
        (gate(*args, grouped=True), forward, fallback),
        (gate_grad(*args), backward, {}),
        (gate_grad(*args, grouped=True), backward, {}),
        (norm(*args), in_rows, {}),
        (gate(*args), in_rows, {}),
        (gate_grad(*args), summed, {}),
    ]
    kernels = [
        kernel
        for source, layouts, options in calls
        for kernel in compile_quantize(
            source, *layouts, capability=capability, **options
        )
    ]
    # The gradients of blocks of 256 rows take two passes, and one of these two kernels.
    assert len(kernels) == (9 if r == 256 else 8)
    for kernel in kernels:
        assert kernel.spills == 0, kernel.name
        assert kernel.shared <= SHARED_MEMORY[capability], kernel.name
        # Loads of x take at least 8 bytes at once.
        assert re.search(r"ld\.global\.v[24]", kernel.ptx), kernel.name
