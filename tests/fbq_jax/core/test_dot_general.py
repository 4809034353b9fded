"""The quantized dot_general against its equations in float64, and its contract."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fbq_jax import Fp8Dot, Gemm, Recipe, dot_general, llm_int8_dot, nonlinear, recipes
from tests import oracle
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast, with_first_fast

MATMUL = (((1,), (0,)), ((), ()))


@functools.partial(jax.jit, static_argnames=("dims", "recipe"))
def product(lhs, rhs, cotangent, dims=MATMUL, recipe=recipes.fallback, **options):
    """The output and both gradients."""
    options.setdefault("key", jax.random.key(0))
    out, vjp = jax.vjp(
        lambda a, b: dot_general(a, b, dims, recipe=recipe, **options)[0], lhs, rhs
    )
    return out, *vjp(cotangent)


def seed_of(key, stream):
    """The seed of one noise stream of a call, for the first matrix of a stack."""
    seed = jax.random.bits(key, (), jnp.uint32)
    return int(oracle.fold(oracle.fold(int(seed), stream), 0))


@pytest.mark.parametrize(
    ("block", "criterion", "scales"),
    rows_with_first_fast(
        [
            ((128, 128, 128), "absmax", "row"),
            ((64, 64, 128), "absmax", "block"),
            ((128, 128, 128), "absmax", "block"),
            ((32, 64, 256), "l1_rel", "block"),
            ((64, 128, 32), None, "block"),
        ],
        2,
    ),
)
def test_three_gemms_against_float64(block, criterion, scales):
    """Every operand of every GEMM is rounded as the recipe says."""
    recipe = Recipe(
        block=block,
        criterion=criterion,
        dlhs=Gemm(lhs="stochastic", scales=scales),
        drhs=Gemm(lhs="stochastic", rhs="stochastic", scales=scales),
    )
    theta = {None: np.inf, "absmax": 150.0, "l1_rel": 0.3}[criterion]
    m, k, n = block
    x, w, dy = heavy((200, 300), 0), heavy((300, 150), 1), heavy((200, 150), 2)
    key = jax.random.key(9)
    run = jax.jit(functools.partial(product, recipe=recipe))
    y, dx, dw = run(x, w, dy, theta=theta, key=key)

    x_fwd = oracle.quantize_fallback(x, theta, (m, k), criterion or "absmax")[2]
    w_codes = oracle.quantize(w, (k, n))[2]
    x_noise = oracle.noise(seed_of(key, 0), x.shape)
    dy_noise = oracle.noise(seed_of(key, 2), dy.shape)
    assert oracle.relative(y, x_fwd @ w_codes) <= 1e-5
    row, column = ((1, 150), (200, 1)) if scales == "row" else ((m, n), (m, n))
    w_bwd = oracle.quantize(w, (1, 150) if scales == "row" else (k, n))[2]
    dy_rows = oracle.quantize(dy, row, dy_noise)[2]
    x_bwd = oracle.quantize(x, column if scales == "row" else (m, k), x_noise)[2]
    dy_columns = oracle.quantize(dy, column, dy_noise)[2]
    assert oracle.relative(dx, dy_rows @ w_bwd.T) <= 1e-5
    assert oracle.relative(dw, x_bwd.T @ dy_columns) <= 1e-5


# Orders and batches come first; the others are simpler.
DIMENSIONS = {
    "descending_contraction": ((6, 5, 8), (8, 5, 9), (((2, 1), (0, 1)), ((), ()))),
    "two_batch_dims": ((2, 3, 4, 16), (3, 16, 5, 2), (((3,), (1,)), ((0, 1), (3, 0)))),
    "dense": ((4, 6, 40), (40, 24), (((2,), (0,)), ((), ()))),
    "dense_general_out": ((4, 6, 5, 8), (5, 8, 24), (((2, 3), (0, 1)), ((), ()))),
    "contract_first": ((40, 7), (40, 9), (((0,), (0,)), ((), ()))),
    "swapped_contraction": ((6, 5, 8), (8, 5, 9), (((1, 2), (1, 0)), ((), ()))),
    "moe_experts": ((3, 10, 16), (3, 16, 12), (((2,), (1,)), ((0,), (0,)))),
    "batch_in_the_middle": ((10, 3, 16), (16, 12, 3), (((2,), (0,)), ((1,), (2,)))),
    "vector": ((40,), (40, 9), (((0,), (0,)), ((), ()))),
    "outer": ((5,), (7,), (((), ()), ((), ()))),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    rows_with_first_fast(
        zip(
            DIMENSIONS,
            itertools.cycle([jnp.bfloat16, jnp.float16, jnp.float32]),
            strict=False,
        ),
        2,
    ),
)
def test_any_dimension_numbers(name, dtype):
    """Shapes, dtypes and values match lax.dot_general, gradients included."""
    lhs_shape, rhs_shape, dims = DIMENSIONS[name]
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal(lhs_shape), dtype)
    rhs = jnp.asarray(rng.standard_normal(rhs_shape), dtype)
    exact, exact_vjp = jax.vjp(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs)
    cotangent = jnp.asarray(rng.standard_normal(exact.shape), exact.dtype)
    arrays = product(lhs, rhs, cotangent, dims, recipes.block)
    for got, want in zip(arrays, (exact, *exact_vjp(cotangent)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert oracle.relative(got, want) < 0.03


@pytest.mark.parametrize(
    ("name", "sizes"),
    rows_with_first_fast(
        itertools.product(
            [
                *("fallback_rowwise_bwd", "fallback", "switchback_m"),
                *("per_tensor", "aqt_int8_local"),
            ],
            [(4, 0, 4), (0, 4, 4), (4, 4, 0)],
        )
    ),
)
def test_empty_operands(name, sizes):
    m, k, n = sizes
    x, w, dy = jnp.zeros((m, k)), jnp.zeros((k, n)), jnp.zeros((m, n))
    y, dx, dw = product(x, w, dy, recipe=recipes.NAMED[name])
    np.testing.assert_array_equal(y, dy)
    assert (dx.shape, dw.shape) == ((m, k), (k, n))


@pytest.mark.parametrize(
    "name", ["fallback", "switchback", "switchback_m", "aqt_int8_local"]
)
def test_dtypes(name):
    """Operands of different dtypes behave as in JAX's dot_general."""

    def gradients(x, w):
        options = {"recipe": recipes.NAMED[name], "preferred_element_type": jnp.float16}
        options |= {"dimension_numbers": MATMUL, "key": jax.random.key(0)}
        dot = functools.partial(dot_general, **options)
        out, vjp = jax.vjp(lambda x, w: dot(x, w)[0], x, w)
        return out, *vjp(out)

    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.float32)
    out, dx, dw = jax.eval_shape(gradients, x, w)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float16, jnp.bfloat16, jnp.float32)


def assert_unbiased(samples, exact):
    """The mean over n samples approaches the exact gradient as 1/sqrt(n)."""
    samples = np.asarray(samples, np.float64)
    one = np.mean([oracle.relative(sample, exact) for sample in samples[:64]])
    for n in (16, 128, 512):
        mean = oracle.relative(samples[:n].mean(0), exact)
        assert mean == pytest.approx(one / np.sqrt(n), rel=0.3)


def test_gradients_are_unbiased():
    x, w, dy = heavy((48, 40), 0), heavy((40, 32), 1), heavy((48, 32), 2)
    keys = jax.random.split(jax.random.key(0), 512)
    gradients = jax.jit(lambda key: product(x, w, dy, key=key)[1:])
    dx, dw = jax.jit(lambda keys: lax.map(gradients, keys))(keys)
    assert_unbiased(dx, np.float64(dy) @ oracle.quantize(w, (128, 128))[2].T)
    assert_unbiased(dw, np.float64(x).T @ np.float64(dy))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fallback", "aqt_int8_local"])
def test_vmap_draws_noise_of_its_own_for_each_example(name):
    x, dy = (jnp.broadcast_to(heavy((32, 32), i), (3, 32, 32)) for i in (0, 2))
    run = functools.partial(product, recipe=recipes.NAMED[name])
    y, _, dw = jax.vmap(run, (0, None, 0))(x, heavy((32, 32), 1), dy)
    np.testing.assert_array_equal(y[1:], y[:-1])
    assert len(np.unique(dw, axis=0)) == 3


@pytest.mark.parametrize("name", with_first_fast(recipes.NAMED))
def test_vmap_over_an_empty_axis_gives_empty_results(name):
    x, w, dy = jnp.ones((0, 4, 64)), jnp.ones((64, 8)), jnp.ones((0, 4, 8))
    run = functools.partial(product, recipe=recipes.NAMED[name])
    results = jax.vmap(run, (0, None, 0))(x, w, dy)
    assert [y.shape for y in results] == [(0, 4, 8), (0, 4, 64), (0, 64, 8)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_stay_visible(bad):
    x, w, dy = heavy((256, 256)), heavy((256, 256), 1), heavy((256, 256), 2)

    def run(x, w, dy):
        return [~np.isfinite(np.asarray(a)) for a in product(x, w, dy)]

    y, _, dw = run(x.at[3, 200].set(bad), w, dy)
    assert y[:128].all()
    assert not y[128:].any()
    assert dw[128:].all()
    y, dx, _ = run(x, w.at[3, 200].set(bad), dy)
    assert y[:, 128:].all()
    assert dx[:, :128].all()
    y, dx, dw = run(x, w, dy.at[3, 200].set(bad))
    assert not y.any()
    assert dx[:128].all()
    assert dw[:, 128:].all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: dot_general(x, x.T, MATMUL, key=jax.random.key(0))[0],
        lambda x: llm_int8_dot(x, x.T, MATMUL),
        lambda x: Fp8Dot(scaling="current")(x, x.T, MATMUL),
        nonlinear.gelu,
        lambda x: nonlinear.silu_gate(x, x),
        lambda x: nonlinear.rms_norm(x, jnp.ones(4)),
        lambda x: nonlinear.layer_norm(x, jnp.ones(4), jnp.ones(4)),
    ],
)
def test_second_derivatives_are_refused(function):
    first = jax.grad(lambda x: jnp.sum(function(x) ** 2))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(first(x))), jnp.ones((4, 4)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rhs": jnp.ones((3, 4))}, TypeError, "contracting dimensions"),
        ({"rhs": jnp.float32(1)}, TypeError, "dimension"),
        (
            {"lhs": jnp.ones((4, 4), int)},
            TypeError,
            "lhs is int32; a quantized dot takes bfloat16, float16, float32",
        ),
        ({"rhs": jnp.ones((4, 4), bool)}, TypeError, "rhs is bool"),
        ({"preferred_element_type": jnp.int32}, TypeError, "element_type is int32"),
        ({"theta": -1.0}, ValueError, "at least 0"),
        ({"theta": np.nan}, ValueError, "at least 0"),
        ({"precision": "highest"}, ValueError, "the recipe sets the precision"),
    ],
)
def test_bad_input_is_named(options, error, message):
    arguments = {"lhs": jnp.ones((4, 4)), "rhs": jnp.ones((4, 4)), **options}
    with pytest.raises(error, match=message):
        dot_general(**arguments, dimension_numbers=MATMUL)


@pytest.mark.parametrize(
    "precision",
    [
        None,
        "default",
        "fastest",
        ("bfloat16", None),
        lax.Precision.DEFAULT,
        lax.DotAlgorithmPreset.DEFAULT,
    ],
)
def test_default_precision_is_tolerated(precision):
    assert dot_general(jnp.ones((4, 4)), jnp.ones((4, 4)), MATMUL, precision)[0].all()


@pytest.mark.parametrize("dtype", with_first_fast([jnp.bfloat16, jnp.float16]))
def test_the_output_is_rounded_once(dtype):
    x, w = heavy((64, 300), dtype=dtype), heavy((300, 64), 1, dtype)
    dot = functools.partial(dot_general, x, w, MATMUL, None, theta=20.0)
    got, wide = jax.jit(lambda: (dot(None)[0], dot(jnp.float32)[0]))()
    np.testing.assert_array_equal(got, wide.astype(dtype))
