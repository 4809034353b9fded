"""The quantizing Triton kernels: their results, and their compiled code."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels import reference
from tests.kernels import grouped_cases
from tests.kernels import quantize_cases as cases
from tests.kernels.test_reference import heavy
from tests.kernels.triton_tools import compile_kernels, interpreted
from tests.marks import with_first_fast

# The most shared memory of one program, in bytes, by compute capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.fixture(scope="module")
def ops():
    return interpreted("quantize")


@pytest.fixture(scope="module")
def vectors():
    return interpreted("quantize_vectors")


@pytest.fixture(scope="module")
def row_blocks():
    return interpreted("quantize_row_blocks")


@pytest.mark.parametrize(
    "case", with_first_fast(cases.QUANTIZE[1:] + cases.QUANTIZE[:1])
)
def test_quantize(ops, case):
    shape, dtype, *options = case
    cases.check_quantize(ops, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("case", with_first_fast(cases.FALLBACK))
def test_fallback(ops, case):
    shape, dtype, *options = case
    cases.check_fallback(ops, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("case", with_first_fast(grouped_cases.QUANTIZE))
def test_grouped_rows(ops, case):
    grouped_cases.check_quantize(ops, *case)


@pytest.mark.parametrize("case", with_first_fast(grouped_cases.FALLBACK))
def test_grouped_rows_with_fallback(ops, case):
    grouped_cases.check_fallback(ops, *case)


@pytest.mark.parametrize("case", with_first_fast(cases.VECTORS))
def test_vectors(vectors, case):
    shape, dtype, *options = case
    cases.check_vectors(vectors, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("case", with_first_fast(cases.ROW_BLOCKS))
def test_row_blocks(row_blocks, case):
    shape, dtype, *options = case
    cases.check_row_blocks(row_blocks, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("case", with_first_fast(cases.COLWISE_IN_BLOCKS))
def test_row_blocks_and_blocks(row_blocks, case):
    shape, dtype, *options = case
    cases.check_colwise_in_blocks(row_blocks, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("case", with_first_fast(cases.FLOAT8))
def test_float8(ops, row_blocks, case):
    shape, dtype, *options = case
    cases.check_float8(ops, row_blocks, heavy(shape, dtype=dtype), *options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", cases.SPECIAL_DTYPES)
def test_special_float8(ops, row_blocks, dtype):
    cases.check_special_float8(ops, row_blocks, dtype)


@pytest.mark.parametrize(
    "options", with_first_fast([{"colwise": "stochastic"}, {"sums": ("rowwise",)}])
)
def test_float8_codes_refuse_noise_and_sums(ops, row_blocks, options):
    x, seeds = jnp.ones((1, 32, 32)), jnp.zeros(1, jnp.uint32)
    every = {"block": (32, 32), "rowwise": "nearest", "colwise": None}
    every |= {"dtype": "float8_e4m3fn"} | options
    quantizations = [ops.quantize, reference.quantize]
    if "sums" not in options:
        quantizations += [row_blocks.quantize_row_blocks, reference.quantize_row_blocks]
    for quantize in quantizations:
        with pytest.raises(ValueError, match=r"^FP8 codes take nearest rounding and n"):
            quantize(x, seeds, **every)


def test_per_tensor_scale(vectors):
    cases.check_per_tensor_scale(vectors, heavy((2, 70, 141)))


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
def test_special_blocks(ops, vectors, dtype):
    cases.check_special(ops, dtype)
    cases.check_special_vectors(vectors, dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", cases.SPECIAL_DTYPES)
def test_special_row_blocks(row_blocks, dtype):
    cases.check_special_row_blocks(row_blocks, dtype)


@pytest.mark.parametrize("criterion", with_first_fast(["l1", "l1_rel"]))
def test_large_metrics(ops, criterion):
    cases.check_large_metrics(ops, criterion)


def test_a_shard_draws_the_noise_of_the_global_matrix(ops, vectors, row_blocks):
    cases.check_global_offset(ops, vectors, row_blocks)


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
def test_compiles_without_spills(capability, dtype, block, criterion):
    x = jax.ShapeDtypeStruct((1, 4096, 4096), dtype)
    theta = jax.ShapeDtypeStruct((1,), jnp.float32)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    compiled = functools.partial(
        compile_kernels, "quantize", capability=capability, block=block
    )
    kernels = [
        *compiled("quantize", x, seeds, rowwise="stochastic", colwise="nearest"),
        *compiled(
            "quantize_fallback",
            x,
            theta,
            seeds,
            criterion=criterion,
            colwise="stochastic",
        ),
    ]
    check_kernels(kernels, capability)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "rowwise", "colwise", "bound"),
    [
        (90, "bfloat16", "stochastic", "stochastic", 127.5),
        (90, "bfloat16", None, "stochastic", 127.0),
        (89, "float16", "stochastic", None, 127.0),
        (80, "float32", "nearest", "nearest", 127.0),
    ],
)
def test_vectors_compile_without_spills(capability, dtype, rowwise, colwise, bound):
    x = jax.ShapeDtypeStruct((1, 4096, 4096), dtype)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernels = compile_kernels(
        "quantize_vectors",
        "quantize_vectors",
        x,
        seeds,
        capability=capability,
        rowwise=rowwise,
        colwise=colwise,
        bound=bound,
    )
    assert len(kernels) == 2
    check_kernels(kernels, capability)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (256, 128)])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_row_blocks_compile_without_spills(capability, dtype, block, in_blocks):
    x = jax.ShapeDtypeStruct((1, 4096, 4096), dtype)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernels = compile_kernels(
        "quantize_row_blocks",
        "quantize_row_blocks",
        *(x, seeds),
        capability=capability,
        block=block,
        rowwise="stochastic",
        colwise="stochastic",
        colwise_in_blocks=in_blocks,
        sums=("colwise",) if in_blocks else (),
    )
    check_kernels(kernels, capability)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        pytest.param(89, "float32", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", with_first_fast(["quantize_row_blocks", "quantize"]))
def test_float8_compiles_without_spills(name, capability, dtype):
    kernels = compile_kernels(
        name,
        name,
        jax.ShapeDtypeStruct((1, 4096, 4096), dtype),
        jax.ShapeDtypeStruct((1,), jnp.uint32),
        capability=capability,
        block=(128, 128),
        rowwise="nearest",
        colwise="nearest",
        dtype="float8_e4m3fn",
    )
    check_kernels(kernels, capability)
    # Rounded once, from float32.
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernels[0].ptx
    assert "e4m3x2.f16x2" not in kernels[0].ptx


def check_kernels(kernels, capability):
    """Kernels do not spill; loads and stores take 16 bytes at once."""
    for kernel in kernels:
        assert kernel.spills == 0, kernel.name
        assert kernel.shared <= SHARED[capability], kernel.name
        assert "ld.global.v4" in kernel.ptx
        assert "st.global.v4" in kernel.ptx or kernel.name == "_find_maxima"
