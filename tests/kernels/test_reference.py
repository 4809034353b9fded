"""The reference ops: codes bit for bit against NumPy, products against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.scales import divide
from fbq_jax.kernels.sources import Matrix
from tests import oracle
from tests.kernels import quantize_cases as cases
from tests.kernels.quantize_cases import FLOAT8, Case, heavy, near, noisy
from tests.marks import with_first_fast


@functools.partial(jax.jit, static_argnames=("layout", "criterion", "dtype"))
def quantize(x, layout, theta=None, criterion=None, dtype="int8"):
    """The rowwise codes of matrices, and the metric of their blocks."""
    seeds, options = jnp.zeros(len(x), jnp.uint32), {"dtype": dtype}
    options |= {"rowwise": layout, "colwise": None, "criterion": criterion}
    found = reference.quantize(Matrix(x), seeds, theta, **options)
    return found.rowwise, found.metric


matmul = jax.jit(reference.matmul, static_argnames="dtype")

# Every kind of scale and of rounding in both layouts, and every criterion.
LAYOUTS = [
    (near(32, 256), noisy(32, 256), {}),
    (near(1, 128), noisy(64, 1), {}),
    (noisy(1, 32), near(32, 32, sums=True), {}),
    (noisy(1, None), near(None, 1), {"bound": 127.5}),
    (near(None, None), noisy(None, None), {"bound": 127.5}),
    (near(64, 128), noisy(64, 128), cases.absmax(150.0)),
    (near(64, 128), None, cases.l1(900.0)),
    (near(64, 128), None, cases.l1_rel(0.5)),
    (near(32, 128), near(32, 128), FLOAT8),
    (near(1, 128), near(32, 1), FLOAT8),
]


@pytest.mark.parametrize("dtype", with_first_fast(cases.SPECIAL_DTYPES))
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_codes_and_scales_are_bit_exact(layouts, dtype):
    case = Case(cases.matrix((2, 200, 300), dtype), *layouts)
    found = cases.check_against_oracle(case)
    if found.metric is not None:  # Some blocks fall back, and some do not.
        assert 0 < np.mean(found.metric > case.options["theta"][0]) < 1


@pytest.mark.parametrize(
    "case",
    [
        *with_first_fast(cases.BLOCKS + cases.FALLBACK + cases.VECTORS + cases.ROWS),
        *cases.special_blocks("float32"),
        *cases.special_vectors("float32"),
        *cases.special_rows("float32"),
    ],
)
def test_other_shapes_and_special_values_are_bit_exact(case):
    cases.check_against_oracle(case)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_per_tensor_scales_of_empty_operands(shape):
    def shapes(*layouts):
        options = dict(zip(("rowwise", "colwise"), layouts, strict=True))
        op = functools.partial(reference.quantize, **options)
        x = Matrix(jnp.zeros((1, *shape)))
        return jax.eval_shape(op, x, jnp.zeros(1, jnp.uint32))

    per_tensor = shapes(near(None, None), near(None, None))
    assert per_tensor == shapes(near(1, None), near(None, 1))


def test_a_block_whose_metric_equals_theta_does_not_fall_back():
    x = heavy((1, 64, 96))
    _, metric = quantize(x, near(32, 32), jnp.zeros(1), "absmax")
    theta = jnp.sort(metric.reshape(-1))[3:4]
    found, _ = quantize(x, near(32, 32), theta, "absmax")
    np.testing.assert_array_equal(found.residual.scales > 0.0, metric > theta[0])
    assert np.sum(found.residual.scales > 0.0) == 2


@pytest.mark.parametrize("criterion", ["l1", "l1_rel"])
def test_large_metrics(criterion):
    options = "criterion", "rowwise", "colwise"
    op = jax.jit(reference.quantize, static_argnames=options)
    cases.check_large_metrics(op, criterion)


def test_division_is_correctly_rounded():
    rng = np.random.default_rng(0)
    amax = np.exp(rng.uniform(np.log(2.0**-118), np.log(3.4e38), 500_000))
    edges = [2.0**-118, 127.0, np.nextafter(np.float32(127), 128), 3.4028235e38, 1.0]
    amax = np.maximum(np.append(amax, edges), 2.0**-118).astype(np.float32)
    top = np.full_like(amax, 127)
    quotient = jax.jit(divide)
    np.testing.assert_array_equal(quotient(top, amax), top / amax)
    np.testing.assert_array_equal(quotient(amax, top), amax / top)


# FP8.


def float8_rows(x, columns):
    """The FP8 codes of a matrix with a scale per row, and their bits."""
    rows, _ = quantize(jnp.asarray(x)[None], near(1, columns), dtype=FLOAT8["dtype"])
    return rows, np.asarray(rows.codes[0]).view(np.uint8)


def test_rounding_of_every_code_and_every_tie_of_float8():
    """With a largest magnitude of 448, the scale is 1."""
    grid = oracle.float8_magnitudes()
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, ties]).astype(np.float32)
    inside = x[x < 448]
    x = np.concatenate([x, np.nextafter(inside, 1e9), np.nextafter(inside, -1e9)])
    x = np.pad(x, (0, -len(x) % 128), constant_values=448.0).reshape(-1, 128)
    x[:, 0] = 448.0
    for signed in (x, -x):
        rows, bits = float8_rows(signed, 128)
        assert np.all(rows.scales == 1.0)
        np.testing.assert_array_equal(bits, oracle.round_float8(signed))
        assert np.all(np.isin(np.abs(np.asarray(rows.codes[0], np.float64)), grid))


def test_special_blocks_of_float8():
    """Values that differ by their sign alone have codes that do, too."""
    x = np.array(heavy((8, 64)))
    x[1], x[2], x[3] = 0.0, -0.0, -(2.0**-118)
    x[4, 3], x[5, 9], x[6] = np.nan, -np.inf, np.finfo(np.float32).max
    x[7, 1:] = 2.0**-117
    x[7, 0] = -(2.0**-117)
    rows, bits = float8_rows(x, 64)
    codes, scales, _ = oracle.quantize_float8(x, (1, 64))
    finite = np.r_[0:4, 6:8]
    np.testing.assert_array_equal(bits[finite], codes[finite])
    np.testing.assert_array_equal(rows.scales[0], scales)
    np.testing.assert_array_equal(np.isnan(scales[:, 0]), [0, 0, 0, 0, 1, 1, 0, 0])
    assert np.all(scales[1:4] == 0.0)
    assert np.all(rows.codes[0, 4:6] == 0.0)
    assert scales[7, 0] > 0.0
