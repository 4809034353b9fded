"""The Hadamard transform keeps products and spreads what a row holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.kernels import reference
from fbq_jax.kernels.hadamard import SCALE, SIZE, pad_rows, transform_rows
from tests import oracle
from tests.gpus import h200s, needs_compiler
from tests.kernels.test_reference import heavy


@jax.jit
def transform(x):
    return transform_rows(pad_rows(x))


MATRIX = np.asarray(transform(jnp.eye(SIZE)[None])[0], np.float64)


def test_the_matrix_is_orthogonal_and_of_one_magnitude():
    signs = MATRIX * np.sqrt(SIZE)
    np.testing.assert_allclose(np.abs(signs), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(np.rint(signs.T @ signs), SIZE * np.eye(SIZE))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, SIZE, 300])
def test_groups_of_rows_are_transformed(rows, dtype):
    x = heavy((2, rows, 5), dtype=dtype)
    got = np.asarray(transform(x))
    padded = np.zeros((2, got.shape[1], 5))
    padded[:, :rows] = np.asarray(x, np.float64)
    assert 0 <= got.shape[1] - rows < SIZE
    for first in range(0, got.shape[1], SIZE):
        group = slice(first, first + SIZE)
        assert oracle.relative(got[:, group], MATRIX @ padded[:, group]) < 1e-6


def test_products_over_the_rows_stay():
    x, y = heavy((300, 40), 0), heavy((300, 30), 1)
    left, right = (transform(matrix[None])[0] for matrix in (x, y))
    product = np.float64(left).T @ right
    assert oracle.relative(product, np.float64(x).T @ y) < 1e-6


def test_neither_an_outlier_nor_a_common_mean_stands_out():
    outlier = np.zeros((1, SIZE, 1), np.float32)
    outlier[0, 17] = 606.0
    spread = np.abs(transform(jnp.asarray(outlier)))
    np.testing.assert_allclose(spread, 606.0 / np.sqrt(SIZE), rtol=1e-6)
    mean = np.abs(transform(jnp.ones((1, SIZE, 1))))
    assert mean.max() < 0.4 * np.sqrt(SIZE)  # all of it, if the matrix summed the rows


@needs_compiler
def test_xla_keeps_the_scale_and_the_inverse_apart():
    """Compiled for an H200, SCALE multiplies the values, and nothing smaller."""
    sharding = NamedSharding(h200s(1, "x"), PartitionSpec())
    x = jax.ShapeDtypeStruct((1, 512, 256), jnp.bfloat16, sharding=sharding)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32, sharding=sharding)
    quantize = functools.partial(
        reference.quantize_vectors, rowwise=None, colwise="stochastic", hadamard=True
    )
    text = jax.jit(quantize).lower(x, seeds).compile().as_text()
    constants = re.findall(r"(%[\w.]+) = f32\[\] constant\((0\.0\d+)\)", text)
    names = [
        name for name, value in constants if np.float32(value) == np.float32(SCALE)
    ]
    spread = r"= f32\[([\d,]+)\]\S* broadcast\((%[\w.]+)\)"
    sizes = [shape for shape, name in re.findall(spread, text) if name in names]
    assert sizes
    assert {np.prod([*map(int, size.split(","))]) for size in sizes} == {512 * 256}
