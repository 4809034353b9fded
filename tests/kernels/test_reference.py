"""The reference ops: codes bit for bit against NumPy, products against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbq_jax.kernels import reference
from fbq_jax.kernels.quantized import Layout
from fbq_jax.kernels.scales import divide
from fbq_jax.kernels.sources import Matrix
from tests import oracle
from tests.kernels import quantize_cases as cases
from tests.kernels.quantize_cases import Case, heavy
from tests.marks import pairs_with_first_fast, with_first_fast

SIDES = (32, 64, 128, 256)


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("dtype", "block"),
    pairs_with_first_fast(
        ["float32", "bfloat16", "float16"],
        [(128, 128), (32, 256), (64, 32), (256, 64)],
    ),
)
def test_codes_and_scales_are_bit_exact(mode, dtype, block):
    layout = Layout(mode, block)
    case = Case(cases.matrix((2, 200, 300), dtype), layout, layout)
    got = cases.check_against_oracle(case)
    jax.tree.map(
        np.testing.assert_array_equal,
        (got.rowwise.codes.mT, got.rowwise.scales.mT),
        (got.colwise.codes, got.colwise.scales),
    )


@pytest.mark.parametrize(
    "case",
    [
        *with_first_fast(cases.BLOCKS),
        *with_first_fast(cases.VECTORS),
        *with_first_fast(cases.ROWS),
        *with_first_fast(cases.WITH_FLOAT8),
        *cases.special_blocks("float32")[:1],
        *cases.special_vectors("float32")[:1],
        *cases.special_rows("float32"),
    ],
)
def test_layouts_are_bit_exact(case):
    cases.check_against_oracle(case)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_vectors_scaled_to_the_edge_of_the_last_code(per_tensor):
    """With AQT's scale, absmax / 127.5, values above 127 are clipped to 127."""
    x = np.array(heavy((2, 40, 70)))
    x[1, 3, 4] = np.inf
    op = functools.partial(
        reference.quantize,
        rowwise=Layout("nearest", (None, None) if per_tensor else (1, None)),
        colwise=Layout("stochastic", (None, None) if per_tensor else (None, 1)),
        bound=127.5,
    )
    got = jax.jit(op)(Matrix(jnp.asarray(x)), jnp.asarray([3, 5], jnp.uint32))
    for i, layout in ((0, got.rowwise), (0, got.colwise)):
        matrix = x[i] if layout is got.rowwise else x[i].T
        noise = 0.0 if layout is got.rowwise else oracle.noise(3, x[i].shape).T
        amax = np.abs(matrix).max(axis=None if per_tensor else 1, keepdims=True)
        v = np.clip(matrix * (np.float32(127.5) / amax), -127, 127)
        np.testing.assert_array_equal(layout.codes[i], np.rint(v + noise))
        scales = np.broadcast_to(amax / np.float32(127.5), (len(matrix), 1))
        np.testing.assert_array_equal(layout.scales[i], scales)
    infinite = np.isnan(got.rowwise.scales[1, :, 0])
    np.testing.assert_array_equal(infinite, per_tensor | (np.arange(40) == 3))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_per_tensor_scales_of_empty_operands(shape):
    def shapes(rowwise, colwise):
        layouts = {
            "rowwise": Layout("nearest", rowwise),
            "colwise": Layout("nearest", colwise),
        }
        op = functools.partial(reference.quantize, **layouts)
        x = Matrix(jnp.zeros((1, *shape)))
        return jax.eval_shape(op, x, jnp.zeros(1, jnp.uint32))

    assert shapes((None, None), (None, None)) == shapes((1, None), (None, 1))


@pytest.mark.parametrize(
    ("criterion", "theta"), [("absmax", 150.0), ("l1", 900.0), ("l1_rel", 0.5)]
)
def test_fallback_is_bit_exact(criterion, theta):
    block, options = (64, 128), {"criterion": criterion, "theta": (theta,)}
    source = cases.matrix((1, 300, 500), "float32")
    case = Case(source, Layout("nearest", block), Layout("stochastic", block), options)
    got = cases.check_against_oracle(case)
    assert 0 < np.mean(np.asarray(got.metric) > theta) < 1
    metric_alone = functools.partial(
        reference.block_metric, block=block, criterion=criterion
    )
    alone = jax.jit(metric_alone)(source().values)
    np.testing.assert_allclose(alone, got.metric, rtol=1e-6)


def test_a_block_whose_metric_equals_theta_does_not_fall_back():
    x = heavy((1, 64, 96))
    metric = quantize_absmax(x, jnp.zeros(1), (32, 32)).metric
    theta = jnp.sort(metric.reshape(-1))[3:4]
    residual = quantize_absmax(x, theta, (32, 32)).rowwise.residual
    np.testing.assert_array_equal(residual.scales > 0.0, metric > theta[0])
    assert np.sum(residual.scales > 0.0) == 2


def test_division_is_correctly_rounded():
    rng = np.random.default_rng(0)
    amax = np.exp(rng.uniform(np.log(2.0**-118), np.log(3.4e38), 500_000))
    edges = [2.0**-118, 127.0, np.nextafter(np.float32(127), 128), 3.4028235e38, 1.0]
    amax = np.maximum(np.append(amax, edges), 2.0**-118).astype(np.float32)
    top = np.full_like(amax, 127)
    quotient = jax.jit(divide)
    np.testing.assert_array_equal(quotient(top, amax), top / amax)
    np.testing.assert_array_equal(quotient(amax, top), amax / top)


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize_rows(x, block, mode="nearest"):
    seeds = jnp.zeros(x.shape[0], jnp.uint32)
    layout = Layout(mode, block)
    return reference.quantize(Matrix(x), seeds, rowwise=layout, colwise=None).rowwise


def test_a_block_at_the_threshold_does_not_fall_back():
    x = jnp.full((1, 32, 64), 0.013).at[0, 0, 0].set(3.0).at[0, 0, 32].set(3.5)
    q = quantize_absmax(x, jnp.array([3.0]), (32, 32)).rowwise
    np.testing.assert_array_equal(q.residual.scales[0, 0] > 0, [False, True])


@functools.partial(jax.jit, static_argnums=2)
def quantize_absmax(x, theta, block):
    seeds = jnp.zeros(x.shape[0], jnp.uint32)
    layout = Layout("nearest", block)
    return reference.quantize(
        Matrix(x), seeds, theta, rowwise=layout, colwise=None, criterion="absmax"
    )


@jax.jit
def multiply_quantized(lhs, rhs):
    return reference.matmul(lhs, rhs, dtype=jnp.float32)


@functools.partial(jax.jit, static_argnames=("block_shape", "fallback"))
def multiply(x, w, theta, block_shape, fallback):
    bm, bk, bn = block_shape
    lhs = quantize_absmax(x, theta, (bm, bk)).rowwise
    if not fallback:
        lhs = dataclasses.replace(lhs, residual=None)
    return reference.matmul(lhs, quantize_rows(w, (bn, bk)), dtype=jnp.float32)


@pytest.mark.exhaustive  # core/test_dot_general.py has fast products
@settings(max_examples=8, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 300)] * 3),
    batch=st.integers(1, 3),
    block_shape=st.tuples(*[st.sampled_from(SIDES)] * 3),
    seed=st.integers(0, 2**31),
    fallback=st.booleans(),
)
def test_matmul_against_float64(shape, batch, block_shape, seed, fallback):
    (m, k, n), (bm, bk, bn) = shape, block_shape
    x, w = heavy((batch, m, k), seed), heavy((batch, n, k), seed + 1)
    theta = 3.0 if fallback else np.inf
    y = multiply(x, w, jnp.full(batch, theta), block_shape, fallback)
    for i in range(batch):
        lhs = oracle.quantize_fallback(x[i], theta, (bm, bk))[2]
        exact = lhs @ oracle.quantize(w[i], (bn, bk))[2].T
        scale = np.linalg.norm(lhs) * np.linalg.norm(w[i]) / np.sqrt(k)
        assert np.linalg.norm(np.asarray(y[i]) - exact) <= 1e-5 * max(
            np.linalg.norm(exact), 1e-2 * scale
        )


def test_a_long_contraction_does_not_overflow():
    """With codes of 127, an int32 sum over all of K overflows at K = 133 153."""
    k = 200_000
    ones = jnp.ones((1, 2, k))
    q = quantize_rows(ones, (128, 128))
    np.testing.assert_allclose(multiply_quantized(q, q), k, rtol=1e-5)


def test_zero_blocks_contribute_exactly_zero():
    x = jnp.zeros((1, 256, 256)).at[:, :128, :128].set(heavy((1, 128, 128)))
    q = quantize_absmax(x, jnp.zeros(1), (128, 128)).rowwise
    assert np.all(np.asarray(q.main.scales)[0] == [[q.main.scales[0, 0, 0], 0], [0, 0]])
    w = quantize_rows(heavy((1, 64, 256)), (128, 128))
    y = multiply_quantized(q, w)
    assert np.all(np.asarray(y)[0, 128:] == 0.0)


@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 2.0**-119])
def test_a_block_too_small_for_a_scale_counts_as_zero(tiny):
    x = jnp.full((1, 4, 4), tiny, jnp.float32)
    q = quantize_rows(x, (32, 32), "stochastic")
    assert not np.any(q.codes)
    assert not np.any(q.scales)


@jax.jit
def relative_l1(x):
    return reference.block_metric(x, block=(128, 128), criterion="l1_rel")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_non_finite_values_show_in_every_row_that_depends_on_them(bad, mode):
    x = heavy((1, 256, 256)).at[0, 130, 5].set(bad)
    q = quantize_rows(x, (128, 128), mode)
    y = multiply_quantized(q, q)
    nan = np.isnan(np.asarray(y[0]))
    assert nan[128:].all()
    assert nan[:, 128:].all()
    assert not nan[:128, :128].any()
    metric = relative_l1(x)
    np.testing.assert_array_equal(np.isnan(metric[0]), [[False, False], [True, False]])


@pytest.mark.parametrize(
    ("outlier", "plain", "fallback", "int16"),
    [(100.0, 0.226, 8.90e-4, 8.85e-4), (600.0, 0.966, 5.4e-3, 5.3e-3)]
    + [(6500.0, 1.00, 9.4e-3, 5.7e-2)],
)
def test_one_outlier_in_a_normal_block(outlier, plain, fallback, int16):
    """Fallback beats INT16 where the outlier dwarfs the rest of the block."""
    x = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
    x[17, 99] = outlier
    q = quantize_absmax(jnp.asarray(x)[None], jnp.zeros(1), (128, 128)).rowwise

    def rms(values):
        return np.sqrt(np.mean((values - x) ** 2, dtype=np.float64))

    main = oracle.dequantize(
        np.asarray(q.main.codes[0]), np.asarray(q.main.scales[0]), (128, 128)
    )
    rest = oracle.dequantize(
        np.asarray(q.residual.codes[0]), np.asarray(q.residual.scales[0]), (128, 128)
    )
    step = outlier / 32767
    assert rms(main) == pytest.approx(plain, rel=0.03)
    assert rms(main + rest) == pytest.approx(fallback, rel=0.03)
    assert rms(np.rint(x / step) * step) == pytest.approx(int16, rel=0.03)
