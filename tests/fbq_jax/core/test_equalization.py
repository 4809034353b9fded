"""Equalization is exact in floats, and rows and columns of W then cost no precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbq_jax import FLOAT_GEMM, Gemm, Recipe, dot_general, recipes
from fbq_jax.core import threshold
from fbq_jax.core.dot_call import DotCall
from fbq_jax.core.dot_general import DotConfig, stateful_dot_general
from fbq_jax.core.equalization import exponents
from fbq_jax.core.frozen_weight import quantize_weight
from tests.marks import with_first_fast

MATMUL = (((1,), (0,)), ((), ()))
IN_FLOATS = Recipe(criterion=None, fwd=FLOAT_GEMM, dlhs=FLOAT_GEMM, drhs=FLOAT_GEMM)
M, K, N = 96, 160, 144


def equalized(recipe):
    return dataclasses.replace(recipe, equalize=True)


def operands(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (M, K), (K, N), (M, N)
    return [
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def products(recipe, x, w, dy):
    def multiply(x, w):
        key = jax.random.key(7)
        return dot_general(x, w, MATMUL, None, x.dtype, recipe=recipe, key=key)[0]

    y, vjp = jax.vjp(multiply, x, w)
    return y, *vjp(dy)


def planted(x, w, dy):
    """The same products, with large and small rows and columns of W."""
    rows, columns = np.ones((K, 1), np.float32), np.ones((1, N), np.float32)
    rows[::17], rows[5::23], columns[:, ::19] = 512, 1 / 512, 256
    return x / rows.T, w * rows * columns, dy / columns


def errors(recipe, operands):
    """Relative errors of the products, each element in units of its row or column."""
    x, w, dy = (np.float64(array) for array in operands)
    exact = x @ w, dy @ w.T, x.T @ dy
    axes = 0, 0, (0, 1)  # a column of W is one of Y, and a row one of dX
    found = []
    for value, true, axis in zip(products(recipe, *operands), exact, axes, strict=True):
        found.append(np.max(np.std(value - true, axis) / np.std(true, axis)))
    return found


@pytest.mark.parametrize("dtype", with_first_fast([jnp.bfloat16, jnp.float32]))
def test_in_floats_no_bit_changes(dtype):
    arrays = [array.astype(dtype) for array in planted(*operands())]
    plain, same = (
        products(recipe, *arrays) for recipe in (IN_FLOATS, equalized(IN_FLOATS))
    )
    for value, expected in zip(same, plain, strict=True):
        np.testing.assert_array_equal(value, expected)
    rows, columns = exponents(arrays[1][None])
    assert np.ptp(rows) >= 17  # 512 and 1 / 512 are 18 powers of two apart
    assert np.ptp(columns) >= 7


@pytest.mark.parametrize(
    "recipe",
    with_first_fast(
        [
            recipes.row_block,
            recipes.row_block_lhs,
            recipes.fallback,
            recipes.fallback_hadamard,
            recipes.fallback_rowwise_bwd,
            recipes.rowwise,
            dataclasses.replace(recipes.row_block, dlhs=FLOAT_GEMM),
        ]
    ),
)
def test_rows_and_columns_of_w_cost_no_precision(recipe):
    before = errors(equalized(recipe), operands())
    after = errors(equalized(recipe), planted(*operands()))
    assert max(before) < 0.06
    # Large channels of X and dY cost the others precision where dW has blocks.
    checked = 2 if "block" in recipe.drhs.scales else 3
    np.testing.assert_array_less(after[:checked], 2.0 * np.array(before[:checked]))
    assert max(errors(recipe, planted(*operands()))[:2]) > 0.5


@pytest.mark.parametrize(
    "recipe", with_first_fast([recipes.row_block, recipes.fallback, recipes.rowwise])
)
def test_dw_stays_as_it_is(recipe):
    arrays = planted(*operands())
    (*_, dw), (*_, expected) = (
        products(each, *arrays) for each in (equalized(recipe), recipe)
    )
    np.testing.assert_array_equal(dw, expected)


def test_an_unquantized_dx_reads_the_codes_of_the_equalized_weight():
    gemm = Gemm(lhs=None, rhs=None, keeps="codes")
    recipe = dataclasses.replace(recipes.row_block, dlhs=gemm)
    assert max(errors(equalized(recipe), planted(*operands()))) < 0.06


def test_a_weight_whose_rows_and_columns_cancel_stays_finite():
    """``R^-1 W`` alone would be infinite."""
    w = jnp.ones((K, N)).at[0].set(2.0**-70).at[:, 0].set(2.0**80)
    rows, columns = exponents(w[None])
    assert rows[0, 0] < -50
    assert columns[0, 0] > 50
    x, *_ = operands()
    y = dot_general(x, w, MATMUL, recipe=recipes.row_block_equalized)[0]
    assert np.all(np.isfinite(y))


@pytest.mark.parametrize("rows", [4, 64])
def test_frozen_layers_quantize_x_in_its_own_dtype(rows):
    """The output has fewer bits, whether or not one kernel quantizes and multiplies."""
    recipe = recipes.row_block_equalized
    config, state = DotConfig(recipe), threshold.start(recipe)
    x, w, _ = operands()
    codes = quantize_weight(config, state, w, MATMUL).codes
    call = DotCall(MATMUL, None, jnp.dtype(jnp.bfloat16), None)
    frozen, live = (
        stateful_dot_general(config, state, x[:rows], w, call, *more)[0]
        for more in ((codes,), ())
    )
    np.testing.assert_array_equal(frozen, live)


@settings(deadline=None)
@given(
    row=st.integers(-12, 12),
    column=st.integers(-12, 12),
    ones=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_exponents_find_the_factors_of_rows_and_columns(row, column, ones):
    rows = np.where(np.array([*ones, True, False]), 0, row)
    columns = np.array([column, 0, 0])
    w = np.ldexp(1.5, rows[:, None] + columns)[None]
    found = exponents(jnp.asarray(w, jnp.float32))
    for shift, expected in zip(found, (rows, columns), strict=True):
        steps = np.asarray(shift[0]) - expected
        np.testing.assert_array_less(np.ptp(steps), 2)  # differences are rounded


@pytest.mark.parametrize("factor", [0.02, 1.0, 1.1, 1.4, 1.99])
def test_even_weights_stay_as_they_are(factor):
    """Wherever the mean of their exponents lies between two integers."""
    _, w, _ = operands()
    for powers in exponents(factor * w[None]):
        assert np.mean(np.asarray(powers != 0)) < 0.01  # few are uneven by chance


@pytest.mark.parametrize("shape", [(1, 2_000_000, 4), (1, 4, 2_000_000)])
def test_means_of_large_weights_do_not_overflow(shape):
    for powers in exponents(jnp.ones(shape)):
        assert not np.any(powers)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_uneven_weights_alone(axis):
    x, w, dy = operands()
    size = w.shape[axis]
    factors = jnp.exp(jax.random.normal(jax.random.key(7), (size,)))
    w *= jnp.expand_dims(factors, 1 - axis)
    assert max(errors(recipes.row_block_equalized, (x, w, dy))) < 0.06


def test_weights_without_a_magnitude_of_rows_and_columns_cost_precision():
    """As the documents say: where most are 0, or where each head has its own rows."""
    x, w, dy = operands()
    is_zero = jax.random.uniform(jax.random.key(6), w.shape) < 0.9
    heads = jnp.exp2(2.0 * jax.random.normal(jax.random.key(5), (K, 8)))
    for weight, least, most in (
        (jnp.where(is_zero, 0.0, w), 2.0, 3.0),
        (w * jnp.repeat(heads, N // 8, 1), 1.3, 1.7),
    ):
        before, after = (
            errors(recipe, (x, weight, dy))[0]
            for recipe in (recipes.row_block, recipes.row_block_equalized)
        )
        assert least < after / before < most


def test_a_few_large_weights_do_not_move_the_others():
    _, w, _ = operands()
    before = exponents(w[None])
    after = exponents(w.at[3, 5].set(1e6)[None])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=1)
        assert np.mean(np.asarray(new != old)) < 0.05


def test_zeros_count_as_nothing():
    _, w, _ = operands()
    zeros = w.at[3].set(0.0).at[:, 5].set(0.0)
    rows, columns = exponents(zeros[None])
    assert rows[0, 3] == columns[0, 5] == 0
    recipe = recipes.row_block_equalized
    for value in products(recipe, *(jnp.zeros_like(x) for x in operands())):
        np.testing.assert_array_equal(value, 0.0)
    x, _, dy = operands()
    for value in products(recipe, x, zeros, dy):
        assert np.all(np.isfinite(value))


def test_values_that_are_not_finite_stay_in_their_blocks():
    x, w, dy = operands()
    w = w.at[3, 5].set(jnp.nan).at[140, 130].set(jnp.inf)
    with jax.debug_nans(False):
        y, *_ = products(recipes.row_block_equalized, x, w, dy)
        plain, *_ = products(recipes.row_block, x, w, dy)
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(plain))


def test_weights_that_are_not_finite_do_not_move_the_others():
    x, w, dy = operands()
    bad = w.at[3, :128].set(jnp.nan)  # columns from 128 on are other blocks
    with jax.debug_nans(False):
        y, *_ = products(recipes.row_block_equalized, x, bad, dy)
    exact = np.float64(x) @ np.float64(w)
    apart = np.float64(y)[:, 128:] - exact[:, 128:]
    assert np.std(apart) < 0.02 * np.std(exact)


@pytest.mark.parametrize("power", [-1.0, -4.0, -8.0])
def test_small_parts_beside_zeros_are_enlarged_once(power):
    """Parts of a block-diagonal W are small in their rows and in their columns."""
    x, w, dy = operands()
    w = w[:128, :128] * jnp.kron(jnp.eye(4), jnp.ones((32, 32)))
    w *= jnp.repeat(jnp.exp2(jnp.array([0.0, power, 0.0, power])), 32)[:, None]
    exact = np.float64(x[:, :128]) @ np.float64(w), np.float64(dy[:, :128] @ w.T)
    found = products(recipes.row_block_equalized, x[:, :128], w, dy[:, :128])
    for value, true in zip(found[:2], exact, strict=True):
        assert np.std(value - true) < 0.03 * np.std(true)


def test_frozen_codes_are_of_the_equalized_weight():
    _, w, _ = planted(*operands())
    recipe = recipes.row_block_equalized
    config, state = DotConfig(recipe), threshold.start(recipe)
    codes = quantize_weight(config, state, w, MATMUL).codes
    for values in (codes.mT.dequantize()[0], codes.dequantize()[0].T):
        rows = np.std(values - w, 1) / np.std(w, 1)
        columns = np.std(values - w, 0) / np.std(w, 0)
        assert max(rows.max(), columns.max()) < 0.06
    with pytest.raises(ValueError, match="QArray has no factors for rows"):
        codes.to_qarray()


def test_float16_keeps_its_range():
    """``X R`` would leave it: 60000 in a channel of large weights."""
    x, w, dy = operands()
    x = x.at[:, 5].multiply(1024.0).at[0, 5].set(60_000.0)
    w = w.at[5].divide(4.0).at[:, 32:].divide(2048.0).at[32:].divide(2048.0)
    arrays = [array.astype(jnp.float16) for array in (x, w, dy)]
    results = products(recipes.row_block_equalized, *arrays)
    assert {value.dtype for value in results} == {jnp.dtype(jnp.float16)}
    exact = np.float64(arrays[0]) @ np.float64(arrays[1])
    np.testing.assert_allclose(results[0], exact, atol=0.02 * np.abs(exact).max())
