"""The quantized einsum: its product, its state and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    Einsum,
    FallbackConv,
    FallbackDot,
    FallbackEinsum,
    Gemm,
    Recipe,
    RulesDot,
    dot_general,
    fallback_einsum,
    fallback_stats,
)
from fbq_jax.sharding import layer_names
from tests import oracle
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

SMALL = Recipe(block=32)
MATMUL = (((1,), (0,)), ((), ()))
ONE = jnp.ones((1, 1))
FLOAT_EINSUM = FallbackEinsum(jax.lax.dot_general)

# One of each kind; the tests below draw others.
CASES = {
    "btd,dhk->bhtk": ((2, 5, 6), (6, 3, 4)),
    "dhk,btd->thbk": ((6, 3, 4), (2, 5, 6)),  # jnp.einsum may swap the operands
    "bed,edf->fbe": ((5, 3, 6), (3, 6, 4)),
    "d...,...df->f...": ((6, 2, 3), (3, 6, 4)),
    " ab , bc ": ((5, 6), (6, 4)),
    "ba,cb": ((6, 5), (4, 6)),
    # A label of one operand is summed first, as are dimensions of an ellipsis that the
    # output lacks.
    "abc,cde->d": ((3, 8, 6), (6, 4, 5)),
    "b,...bc->c": ((6,), (3, 6, 4)),
    # Outer products, and products of elements.
    "ab,c->bca": ((5, 6), (4,)),
    "td,d->td": ((5, 6), (6,)),
    # A dimension of size 1 is broadcast.
    "ac,cb->ab": ((5, 1), (6, 4)),
    "δж,ж1->δ1": ((5, 6), (6, 4)),
}


@pytest.mark.parametrize("subscripts", CASES)
def test_subscripts_mean_what_they_do_for_jax(subscripts):
    """With a float dot, which leaves the labels as the only difference."""
    lhs, rhs = (heavy(shape, seed) for seed, shape in enumerate(CASES[subscripts]))
    got = FLOAT_EINSUM(subscripts, lhs, rhs)
    exact = jnp.einsum(subscripts, lhs, rhs)
    assert got.shape == exact.shape
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-3)


@st.composite
def einsums(draw):
    """Subscripts and the shapes of two operands, which ``jnp.einsum`` takes."""
    sizes = {label: draw(st.integers(1, 4)) for label in "abcd"}
    rest = draw(st.lists(st.integers(1, 3), max_size=2))  # the ellipsis

    def term(labels, most_rest):
        """An operand's labels, with the ellipsis in any place, and its shape."""
        labels = draw(st.permutations(draw(st.lists(labels, unique=True, max_size=3))))
        where = draw(st.none() | st.integers(0, len(labels)))
        shape = [1 if draw(st.integers(0, 7)) == 0 else sizes[x] for x in labels]
        if where is None:
            return "".join(labels), shape
        own = rest[len(rest) - draw(st.integers(0, most_rest)) :]
        own = [1 if draw(st.integers(0, 7)) == 0 else size for size in own]
        shape[where:where] = own
        return "".join([*labels[:where], "...", *labels[where:]]), shape

    letters = st.sampled_from("abcd")
    (lhs, lhs_shape), (rhs, rhs_shape) = (term(letters, len(rest)) for _ in range(2))
    subscripts = f"{lhs},{rhs}"
    known = sorted({*subscripts} & {*"abcd"})
    if draw(st.booleans()):
        out = draw(st.permutations(known))[: draw(st.integers(0, len(known)))]
        where = draw(st.none() | st.integers(0, len(out)))
        if where is not None:
            out = [*out[:where], "...", *out[where:]]
        subscripts += "->" + "".join(out)
    return subscripts, lhs_shape, rhs_shape


@functools.partial(jax.jit, static_argnums=0)
def products(subscripts, lhs, rhs):
    """The output and both gradients: of JAX, with a float dot, and quantized."""
    recipe = Recipe(block=32, criterion=None, dlhs=Gemm(), drhs=Gemm())
    dot = functools.partial(dot_general, recipe=recipe)
    quantized = FallbackEinsum(lambda *args, **options: dot(*args, **options)[0])
    results = []
    for op in (jnp.einsum, FLOAT_EINSUM, quantized):
        y, vjp = jax.vjp(functools.partial(op, subscripts), lhs, rhs)
        results.append((y, *vjp(jnp.ones_like(y))))
    return results


def check_einsum(case):
    subscripts, *shapes = case
    lhs, rhs = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)
    )
    exact, *others = products(subscripts, lhs, rhs)
    for got, most in zip(others, (1e-5, 0.05), strict=True):
        for x, want, size in zip(got, exact, (lhs, rhs, lhs), strict=True):
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            limit = most * max(float(jnp.linalg.norm(want)), 1.0) * (1 + size.size)
            assert float(jnp.linalg.norm(x - want)) <= limit


@settings(max_examples=15, deadline=None, derandomize=True)
@given(einsums())
def test_what_jax_computes_is_computed(case):
    check_einsum(case)


@pytest.mark.exhaustive
@settings(max_examples=100, deadline=None, derandomize=True)
@given(einsums())
def test_whatever_jax_computes_is_computed(case):
    check_einsum(case)


@pytest.mark.parametrize("subscripts", ["td,d->td", "td,dk->tk", "t,d->td"])
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.float64])
def test_other_dtypes_are_refused(subscripts, dtype):
    """Also where nothing is quantized."""
    shapes = {"td": (2, 3), "d": (3,), "dk": (3, 4), "t": (2,)}
    terms = subscripts.partition("->")[0].split(",")
    with jax.enable_x64(dtype == jnp.float64):
        operands = [jnp.ones(shapes[term], dtype) for term in terms]
        with pytest.raises(TypeError, match=f"lhs is {jnp.dtype(dtype)}; .* takes"):
            fallback_einsum(subscripts, *operands)


def test_a_layer_that_scales_has_no_state():
    args = (4, 32), "...td,td->...td"
    layer = Einsum(*args, dtype=jnp.bfloat16, use_bias=False)
    x = heavy((4, 32), 0)
    variables = layer.init(jax.random.key(0), x)
    assert [*variables] == ["params"]
    plain = nn.Einsum(*args, dtype=jnp.bfloat16, use_bias=False)
    want = plain.apply(variables, x)
    np.testing.assert_array_equal(layer.apply(variables, x), want)


def test_values_and_gradients_are_those_of_the_dot():
    """A transposed batch of products, also against the oracle's codes in float64."""
    x, w = heavy((40, 2, 70), 0), heavy((2, 70, 50), 1)
    dy = heavy((50, 2, 40), 2)

    @jax.jit
    def by_einsum(x, w):
        op = functools.partial(fallback_einsum, "bed,edf->feb")
        y, vjp = jax.vjp(op, x, w)
        return y, *vjp(dy)

    @jax.jit
    def by_dot(x, w):
        dims = (((2,), (1,)), ((1,), (0,)))
        y, vjp = jax.vjp(
            lambda x, w: dot_general(x, w, dims)[0].transpose(2, 0, 1), x, w
        )
        return y, *vjp(dy)

    layer_names.clear()
    with pytest.warns(UserWarning, match="no state"):
        got = by_einsum(x, w)
    with pytest.warns(UserWarning, match="without a key"):
        want = by_dot(x, w)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    theta = np.sort([np.abs(x[:, e]).max() for e in range(2)])[1]  # of 2 blocks
    exact = [
        oracle.quantize_fallback(x[:, e], theta, (128, 128))[2]
        @ oracle.quantize(w[e], (128, 128))[2]
        for e in range(2)
    ]
    assert oracle.relative(got[0], np.stack(exact).transpose(2, 0, 1)) <= 1e-5


@pytest.mark.parametrize("subscripts", with_first_fast(["bd,df->bf", "df,bd->bf"]))
def test_the_first_operand_is_the_activation(subscripts):
    """Only the activation falls back, here in all blocks; ones are exact in INT8."""

    def dot(*args, **kwargs):
        return dot_general(*args, theta=1e-6, **kwargs)[0]

    def error(subscripts, lhs, rhs):
        y = jax.jit(functools.partial(FallbackEinsum(dot), subscripts))(lhs, rhs)
        return oracle.relative(y, jnp.einsum(subscripts, lhs, rhs))

    x, ones = heavy((64, 64), 0), jnp.ones((64, 64))
    first, _, second = subscripts.partition("->")[0].partition(",")
    assert error(subscripts, x, ones) < 1e-3
    assert error(f"{second},{first}->bf", ones, x) > 1e-2


def test_out_sharding_is_that_of_the_output():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    x, w = heavy((8, 6), 0), heavy((6, 4), 1)
    for sharding in (P(None, "a"), NamedSharding(mesh, P("a"))):
        with jax.set_mesh(mesh):
            y = FLOAT_EINSUM("bd,df->fb", x, w, out_sharding=sharding)
        spec = sharding if isinstance(sharding, P) else sharding.spec
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        np.testing.assert_allclose(y, (x @ w).T, rtol=1e-5)


@pytest.mark.parametrize(
    ("subscripts", "ndims", "message"),
    [
        ("ab,bc,cd->ad", (2, 2), "takes two operands, not 3"),
        ("ab->ba", (2, 2), "takes two operands, not 1"),
        ("ab->ba", (2,), "takes a string of subscripts and two operands"),
        (jnp.ones((2, 2)), (2, 2), "takes a string of subscripts and two operands"),
        ("aab,bc->ac", (3, 2), "'aab' has a label twice, .* no diagonal"),
        ("ab,bc->ad", (2, 2), "output 'ad' takes labels of the operands"),
        ("ab,bc->aca", (2, 2), "output 'aca' takes labels of the operands, once each"),
        ("a-b,bc->ac", (2, 2), "labels are letters"),
        ("ab,bc->ac", (3, 2), "'ab' does not fit an operand of 3 dimensions"),
        ("...ab,bc->ac", (1, 2), "'...ab' does not fit an operand of 1 dimensions"),
        ("ab,bc->ac", (2, 2), "label 'b' has size 2 in one and 3 in the other"),
        ("...b,...bc->...c", (2, 3), "a dimension of '...' has size 2 in one and 3"),
    ],
)
def test_an_einsum_that_is_not_a_product_is_named(subscripts, ndims, message):
    sizes = zip((2, 3), ndims, strict=False)
    operands = [jnp.ones((size,) * ndim) for size, ndim in sizes]
    with pytest.raises(ValueError, match=f"einsum .*{message}"):
        fallback_einsum(subscripts, *operands)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FallbackEinsum(Recipe()), "FallbackEinsum takes a dot_general, such "),
        (lambda: FallbackConv(Recipe()), "FallbackConv takes a dot_general, such as "),
        (
            lambda: fallback_einsum("ab,bc->ac", [[1.0]], ONE),
            "lhs is a list; .* arrays",
        ),
        (lambda: dot_general(ONE, [[1.0]], MATMUL), "rhs is a list; .* takes arrays"),
    ],
)
def test_what_is_no_dot_general_and_no_array_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_linen_layer_matches_flax_and_has_state():
    x = jax.random.normal(jax.random.key(1), (2, 20, 32))
    options = {"dtype": jnp.bfloat16, "bias_init": nn.initializers.normal()}
    args = (32, 2, 24), "btd,dhk->bhtk"
    op = FallbackEinsum(FallbackDot(SMALL))
    layer, plain = Einsum(*args, einsum_op=op, **options), nn.Einsum(*args, **options)
    variables, floats = (jax.jit(m.init)(jax.random.key(0), x) for m in (layer, plain))
    jax.tree.map(np.testing.assert_array_equal, variables["params"], floats["params"])
    train = jax.jit(functools.partial(layer.apply, mutable=["fallback"]))
    y, updates = train(variables, x)
    exact = plain.apply(floats, x)
    assert y.dtype == exact.dtype
    assert oracle.relative(y, exact) < 0.02
    stats = fallback_stats(updates)["(root)"]
    assert (stats.count, stats.theta > 0) == (1, True)


def test_rules_reach_einsum_layers():
    dot = RulesDot({"0": SMALL, "1": None})

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("0", "1", "2"):
                op = FallbackEinsum(dot)
                x = Einsum((8, 8), "ab,bc->ac", einsum_op=op, name=name)(x)
            return x

    report = dot.report(Model(), jax.random.key(0), jnp.ones((4, 8)))
    assert (report.layers, report.unmatched_layers) == ({"0": "0", "1": "1"}, ("2",))
