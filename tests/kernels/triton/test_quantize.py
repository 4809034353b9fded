"""The Triton kernels that quantize: their bits, and what they compile to."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kernels import quantize_cases as cases
from tests.kernels.test_reference import heavy
from tests.kernels.triton_tools import compile_kernels, interpreted

# Shared memory that one program may take, by capability.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.fixture(scope="module")
def ops():
    return interpreted("quantize")


@pytest.fixture(scope="module")
def vectors():
    return interpreted("quantize_vectors")


@pytest.mark.parametrize(("shape", "dtype", "block", "rows", "columns"), cases.QUANTIZE)
def test_quantize(ops, shape, dtype, block, rows, columns):
    cases.check_quantize(ops, heavy(shape, dtype=dtype), block, rows, columns)


@pytest.mark.parametrize(
    ("shape", "dtype", "block", "criterion", "theta", "columns"), cases.FALLBACK
)
def test_fallback(ops, shape, dtype, block, criterion, theta, columns):
    x = heavy(shape, dtype=dtype)
    cases.check_fallback(ops, x, block, criterion, theta, columns)


@pytest.mark.parametrize(("shape", "dtype", "rows", "columns"), cases.VECTORS)
def test_vectors(vectors, shape, dtype, rows, columns):
    cases.check_vectors(vectors, heavy(shape, dtype=dtype), rows, columns)


def test_scale_of_a_tensor(vectors):
    cases.check_scale_of_a_tensor(vectors, heavy((2, 70, 141)))


@pytest.mark.parametrize("dtype", cases.SPECIAL_DTYPES)
def test_special_blocks(ops, vectors, dtype):
    cases.check_special(ops, dtype)
    cases.check_special_vectors(vectors, dtype)


def test_a_part_draws_the_noise_of_the_whole(ops, vectors):
    cases.check_origin(ops, vectors)


@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_empty_operands(ops, vectors, shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    cases.check_vectors(vectors, x, "nearest", "stochastic")
    cases.check_quantize(ops, x, (32, 64), "nearest", "stochastic")
    cases.check_fallback(ops, x, (32, 64), "absmax", (0.0,) * shape[0], "nearest")


# The usual block in two types, the smallest, the narrowest and the largest.
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


@pytest.mark.parametrize(
    ("capability", "dtype", "rows", "columns", "bound"),
    [
        (90, "bfloat16", "stochastic", "stochastic", 127.5),
        (90, "bfloat16", None, "stochastic", 127.0),
        (89, "float16", "stochastic", None, 127.0),
        (80, "float32", "nearest", "nearest", 127.0),
    ],
)
def test_vectors_compile_without_spills(capability, dtype, rows, columns, bound):
    x = jax.ShapeDtypeStruct((1, 4096, 4096), dtype)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    kernels = compile_kernels(
        "quantize_vectors",
        "quantize_vectors",
        x,
        seeds,
        capability=capability,
        rowwise=rows,
        colwise=columns,
        bound=bound,
    )
    assert len(kernels) == 2
    check_kernels(kernels, capability)


def check_kernels(kernels, capability):
    """No spills, and 16 bytes at a time: eight elements in, words of codes out."""
    for kernel in kernels:
        assert kernel.spills == 0, kernel.name
        assert kernel.shared <= SHARED[capability], kernel.name
        assert "ld.global.v4" in kernel.ptx
        assert "st.global.v4" in kernel.ptx or kernel.name == "_find_maxima"
