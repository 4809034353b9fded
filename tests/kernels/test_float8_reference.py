"""The reference ops with FP8 codes, bit for bit against NumPy and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.quantized import Layout
from fbq_jax.kernels.sources import Matrix
from tests import oracle
from tests.kernels import quantize_cases as cases
from tests.kernels.quantize_cases import Case, heavy
from tests.marks import pairs_with_first_fast

FLOAT8 = "float8_e4m3fn"


@functools.partial(jax.jit, static_argnames="block")
def quantize(x, block):
    return reference.quantize(
        Matrix(x[None]),
        jnp.zeros(1, jnp.uint32),
        rowwise=Layout("nearest", block),
        colwise=None,
        dtype=FLOAT8,
    ).rowwise


def bits(layout):
    assert layout.codes.dtype == FLOAT8
    return np.asarray(layout.codes[0]).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_and_scales_are_bit_exact(dtype):
    matrix, options = cases.matrix((1, 200, 300), dtype), {"dtype": FLOAT8}
    for rowwise, colwise in (((32, 128), (32, 128)), ((1, 128), (32, 1))):
        layouts = cases.near(*rowwise), cases.near(*colwise)
        cases.check_against_oracle(Case(matrix, *layouts, options))


def test_rounding_of_every_code_and_every_tie():
    """With a largest magnitude of 448, the scale is 1."""
    grid = oracle.float8_magnitudes()
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, ties]).astype(np.float32)
    inside = x[x < 448]
    x = np.concatenate([x, np.nextafter(inside, 1e9), np.nextafter(inside, -1e9)])
    x = np.pad(x, (0, -len(x) % 128), constant_values=448.0).reshape(-1, 128)
    x[:, 0] = 448.0
    for signed in (x, -x):
        rows = quantize(jnp.asarray(signed), (1, 128))
        assert np.all(rows.scales == 1.0)
        np.testing.assert_array_equal(bits(rows), oracle.round_float8(signed))
        values = np.asarray(rows.codes[0], np.float64)
        assert np.all(np.isin(np.abs(values), grid))


def test_special_blocks():
    """Values that differ by their sign alone have codes that do, too."""
    x = np.array(heavy((8, 64)))
    x[1], x[2], x[3] = 0.0, -0.0, -(2.0**-118)
    x[4, 3], x[5, 9], x[6] = np.nan, -np.inf, np.finfo(np.float32).max
    x[7, 1:] = 2.0**-117
    x[7, 0] = -(2.0**-117)
    rows = quantize(jnp.asarray(x), (1, 64))
    codes, scales, _ = oracle.quantize_float8(x, (1, 64))
    finite = np.r_[0:4, 6:8]
    np.testing.assert_array_equal(bits(rows)[finite], codes[finite])
    np.testing.assert_array_equal(rows.scales[0], scales)
    np.testing.assert_array_equal(np.isnan(scales[:, 0]), [0, 0, 0, 0, 1, 1, 0, 0])
    assert np.all(scales[1:4] == 0.0)
    assert np.all(rows.codes[0, 4:6] == 0.0)
    assert scales[7, 0] > 0.0


@pytest.mark.parametrize(
    ("shape", "block_shape"),
    pairs_with_first_fast([(70, 40, 300), (1, 5, 64)], [(1, 128, 128), (1, 32, 1)]),
)
def test_products(shape, block_shape):
    """Sums of scaled products of the values of codes, in float64."""
    (rows, columns, depth), (m, k, n) = shape, block_shape
    x, w = heavy((rows, depth)), heavy((columns, depth), 1)
    lhs, rhs = quantize(x, (m, k)), quantize(w, (n, k))
    multiply = functools.partial(reference.matmul, dtype=jnp.float32)
    got = jax.jit(multiply)(lhs, rhs)
    values = (oracle.quantize_float8(*pair)[2] for pair in ((x, (m, k)), (w, (n, k))))
    want = np.matmul(*(y if i == 0 else y.T for i, y in enumerate(values)))
    assert oracle.relative(got[0], want) <= 1e-6
