"""The quantized convolution: its product, its state and its errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fbq_jax
from fbq_jax import (
    FallbackConv,
    FallbackDot,
    Recipe,
    RulesDot,
    dot_general,
    fallback_conv,
    fallback_stats,
    freeze,
    recipes,
)
from fbq_jax.core.conv import conv_general_dilated
from fbq_jax.nnx import quantize
from tests import oracle
from tests.collectives import collectives
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

SMALL = Recipe(block=32)
CONV = FallbackConv(FallbackDot(SMALL))
NHWC = ("NHWC", "HWIO", "NHWC")

# Shapes of the input and the kernel, strides, padding, and further options.
CASES = {
    "patches": ((2, 9, 8, 3), (4, 4, 3, 5), (4, 4), "VALID", {}),
    "1x1": ((2, 5, 4, 3), (1, 1, 3, 5), (1, 1), "SAME", {}),
    "1x1 in strides": ((2, 5, 4, 3), (1, 1, 3, 5), (2, 1), "VALID", {}),
    "3x3": ((2, 5, 4, 3), (3, 3, 3, 5), (1, 1), "SAME", {}),
    "7x3 in strides": ((2, 9, 8, 3), (7, 3, 3, 5), (2, 3), "SAME_LOWER", {}),
    "dilated": ((2, 9, 8, 3), (3, 2, 3, 5), (3, 1), "SAME", {"rhs_dilation": (2, 3)}),
    "transposed": (
        (2, 4, 3, 3),
        (3, 3, 3, 5),
        (1, 2),
        [(2, 1), (0, 3)],
        {"lhs_dilation": (2, 3)},
    ),
    "cropped": ((2, 6, 7, 3), (3, 2, 3, 5), (1, 2), [(-1, 2), (1, -2)], {}),
    "1-D": (
        (2, 9, 3),
        (3, 3, 5),
        (1,),
        [(2, 0)],
        {"dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
    "3-D": (
        (2, 3, 5, 3, 4),
        (2, 3, 1, 2, 3),
        (1, 2, 1),
        "SAME",
        {"dimension_numbers": ("NCDHW", "DHWOI", "DNHWC")},
    ),
    "defaults": (
        (2, 3, 5, 4),
        (6, 3, 3, 2),
        (1, 1),
        "SAME",
        {"dimension_numbers": None},
    ),
    "groups": ((2, 5, 4, 6), (3, 3, 2, 9), (1, 2), "SAME", {"feature_group_count": 3}),
    "groups elsewhere": (
        (6, 5, 4, 2),
        (3, 9, 2, 2),
        (2, 1),
        "VALID",
        {"feature_group_count": 3, "dimension_numbers": ("CHWN", "HOWI", "HCNW")},
    ),
    "no batch": ((0, 5, 4, 3), (3, 3, 3, 5), (1, 1), "SAME", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_mean_what_they_do_for_jax(case):
    """With a float dot, which leaves the windows as the only difference."""
    x_shape, w_shape, strides, padding, options = CASES[case]
    options = {"dimension_numbers": NHWC, **options}
    x, w = heavy(x_shape, 0), heavy(w_shape, 1)

    @jax.jit
    def both(x, w):
        results = []
        for conv in (
            functools.partial(conv_general_dilated, lax.dot_general),
            lax.conv_general_dilated,
        ):
            conv = functools.partial(
                conv, window_strides=strides, padding=padding, **options
            )
            y, vjp = jax.vjp(conv, x, w)
            dy = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            results.append((y, *vjp(dy)))
        return results

    for got, exact in zip(*both(x, w), strict=True):
        assert got.shape == exact.shape
        scale = np.abs(exact).max(initial=0.0)
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * scale)


def windows(x, size, stride):
    """The windows ``[N, H', W', size * size * C]`` of padded ``[N, H, W, C]``."""
    spans = [range(0, n - size + 1, stride) for n in x.shape[1:3]]
    rows = [
        x[:, i : i + size, j : j + size].reshape(len(x), -1)
        for i, j in itertools.product(*spans)
    ]
    return np.stack(rows, 1).reshape(len(x), *map(len, spans), -1)


WINDOWS = {"patches": (4, 4, "VALID", 0), "3x3": (3, 1, "SAME", 1)}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_are_copies(kind):
    """Windows are exact copies, and a NaN stays in its windows."""
    size, stride, padding, around = WINDOWS[kind]
    x = heavy((2, 8, 12, 5), dtype=jnp.bfloat16)
    x = x.at[0, 4, 4, 0].set(jnp.nan).at[0, 7, 7, 1].set(-0.0)
    w = jnp.ones((size, size, 5, 1), x.dtype)
    got = []

    def dot(lhs, *args, **kwargs):
        got.append(lhs)
        return lax.dot_general(lhs, *args, **kwargs)

    conv_general_dilated(dot, x, w, (stride, stride), padding, dimension_numbers=NHWC)
    pads = [(0, 0), (around, around), (around, around), (0, 0)]
    exact = windows(np.pad(x.view(np.int16), pads), size, stride)
    bits = np.asarray(got[0]).view(np.int16)
    np.testing.assert_array_equal(bits.reshape(exact.shape), exact)


@pytest.mark.parametrize("kind", with_first_fast(reversed(WINDOWS)))
def test_values_and_gradients_are_those_of_the_dot_of_windows(kind):
    """They are bit-equal, and match the oracle's codes in float64."""
    size, stride, padding, around = WINDOWS[kind]
    x, w = heavy((2, 8, 12, 5), 0), heavy((size, size, 5, 40), 1)
    pads = [(0, 0), (around, around), (around, around), (0, 0)]
    patches = windows(np.pad(x, pads), size, stride)
    positions = np.pad(np.arange(x.size).reshape(x.shape), pads, constant_values=-1)
    theta = 30.0
    dot = functools.partial(dot_general, recipe=SMALL, theta=theta)

    @jax.jit
    def by_conv(x, w):
        def conv(x, w):
            return conv_general_dilated(
                lambda *args, **kwargs: dot(*args, **kwargs)[0],
                *(x, w, (stride, stride), padding),
                dimension_numbers=NHWC,
            )

        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(jnp.sin(y))

    @jax.jit
    def by_dot(x, w):
        dims = (((3,), (0,)), ((), ()))
        y, vjp, stats = jax.vjp(lambda x, w: dot(x, w, dims), x, w, has_aux=True)
        return y, *vjp(jnp.sin(y)), stats.rate

    y, dx, dw = by_conv(x, w)
    matrix = w.reshape(-1, 40)
    want_y, d_patches, want_dw, rate = by_dot(jnp.asarray(patches), matrix)
    assert 0.0 < rate < 1.0
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dw.reshape(want_dw.shape), want_dw)
    want_dx = np.zeros(x.size + 1)  # the last element collects the padding
    np.add.at(
        want_dx, windows(positions, size, stride), np.asarray(d_patches, np.float64)
    )
    assert oracle.relative(dx, want_dx[:-1].reshape(x.shape)) <= 1e-6

    lhs = oracle.quantize_fallback(patches.reshape(-1, len(matrix)), theta, (32, 32))[2]
    exact = lhs @ oracle.quantize(matrix, (32, 32))[2]
    assert oracle.relative(y.reshape(exact.shape), exact) <= 1e-5


@pytest.mark.exhaustive
def test_1x1_is_dense():
    """Output, gradients and state are bit-equal."""
    x = heavy((2, 6, 32, 40), dtype=jnp.bfloat16)
    conv = nn.Conv(24, (1, 1), dtype=x.dtype, conv_general_dilated=CONV)
    dense = nn.Dense(24, dtype=x.dtype, dot_general=FallbackDot(SMALL))
    variables = jax.jit(conv.init)(jax.random.key(0), x)
    flat = {**variables, "params": jax.tree.map(jnp.squeeze, variables["params"])}

    @functools.partial(jax.jit, static_argnums=0)
    def train(layer, variables):
        def loss(params):
            y, updates = layer.apply(
                {**variables, "params": params}, x, mutable=["fallback"]
            )
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, updates)

        grads, (y, updates) = jax.grad(loss, has_aux=True)(variables["params"])
        return y, grads, updates

    got, want = train(conv, variables), train(dense, flat)
    assert got[1]["kernel"].shape == (1, 1, 40, 24)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(jnp.squeeze, got), want)
    stats = fallback_stats(got[2])["(root)"]
    assert (stats.count, stats.theta > 0) == (1, True)


@pytest.mark.exhaustive
def test_linen_layer_matches_flax_with_another_recipe():
    """Passed as an object or a class; without a batch dimension, or with two."""
    x = jax.random.normal(jax.random.key(1), (2, 3, 10, 16), jnp.bfloat16)
    options = {"kernel_size": 3, "padding": "CAUSAL", "dtype": jnp.bfloat16}
    op = FallbackConv(FallbackDot(recipes.rowwise))
    layer = nn.Conv(24, **options, conv_general_dilated=op)
    plain = nn.Conv(24, **options)
    variables = layer.init(jax.random.key(0), x[0, 0])
    floats = plain.init(jax.random.key(0), x[0, 0])
    jax.tree.map(np.testing.assert_array_equal, variables["params"], floats["params"])
    y, state = jax.jit(functools.partial(layer.apply, mutable=["fallback"]))(
        variables, x
    )
    exact = plain.apply(floats, x)
    assert (y.dtype, y.shape) == (exact.dtype, exact.shape)
    assert 1e-4 < oracle.relative(y, exact) < 0.02
    assert fallback_stats(state)["(root)"].count == 1
    of_class = nn.Conv(24, **options, conv_general_dilated_cls=lambda: op)
    trained = {**variables, **state}
    assert jnp.all(
        jax.jit(of_class.apply)(trained, x) == jax.jit(layer.apply)(trained, x)
    )


def test_what_is_saved_for_the_backward_pass():
    """Codes of windows, one per value without overlap; under remat, the input."""
    x = jax.random.normal(jax.random.key(1), (2, 16, 32, 8))

    def saved(module, size, stride):
        layer = module(32, (size, size), stride, conv_general_dilated=CONV)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
        variables = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)

        def apply(params, x):
            variables_ = {**variables, "params": params}
            return layer.apply(variables_, x, mutable=["fallback"])[0]

        _, vjp = jax.eval_shape(functools.partial(jax.vjp, apply), shapes["params"], x)
        leaves = jax.tree.leaves(vjp)
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        weights = size * size * 8 * 32
        return nbytes / x.size, weights / x.size

    total, codes_of_kernel = saved(nn.Conv, 4, 4)
    assert 1.0 < total - codes_of_kernel < 1.1
    total, codes_of_kernel = saved(nn.Conv, 3, 1)
    assert 9.0 < total - codes_of_kernel < 9.1
    total, codes_of_kernel = saved(nn.remat(nn.Conv), 3, 1)
    assert total < 4 * (1 + codes_of_kernel) + 0.01  # in float32


class Net(nn.Module):
    op: FallbackConv | None

    @nn.compact
    def __call__(self, x):
        mask = jnp.ones((2, 2, 3, 8)).at[0, 0].set(0.0)
        conv = functools.partial(nn.Conv, dtype=jnp.bfloat16)
        ours = functools.partial(conv, conv_general_dilated=self.op)
        x = ours(8, (2, 2), 2, mask=mask, name="patch")(x)
        x = ours(8, (3, 3), feature_group_count=2, name="deep/0")(x)
        return conv(4, (1, 1), name="forgotten")(x)


@pytest.mark.exhaustive
def test_rules_reach_convolutions():
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    dot = RulesDot({"patch": None, "deep.*": SMALL, "head": None})
    net = Net(FallbackConv(dot))
    layers = {"patch": "patch", "deep/0": "deep.*"}
    report = dot.report(net, jax.random.key(0), x)
    assert (report.layers, report.unused_rules) == (layers, ("head",))
    assert report.unmatched_layers == ("forgotten",)
    variables = jax.jit(net.init)(jax.random.key(0), x)
    assert list(fallback_stats(variables)) == ["deep/0"]
    floats = Net(FallbackConv(RulesDot({"deep/.": None})))
    params = {"params": variables["params"]}
    assert jnp.all(floats.apply(params, x) == Net(None).apply(params, x))


@pytest.mark.exhaustive
def test_frozen_layers_compute_what_they_trained():
    """Also with a mask and with feature groups."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    net = Net(CONV)
    trained = jax.jit(net.init)(jax.random.key(0), x)
    for state in trained["fallback"].values():
        state["dot_general"]["theta"] = jnp.float32(2.0)
    frozen = freeze(net, trained, x)
    assert frozen["params"]["deep/0"]["kernel"].shape == (3, 3, 4, 8)
    assert len(jax.tree.leaves(frozen["params"]["patch"])) == 1  # the bias
    run = jax.jit(net.apply)
    assert jnp.all(run(frozen, x) == run(trained, x))
    with pytest.raises(ValueError, match=r"layer 'patch' is frozen .* leaves it unq"):
        Net(None).apply(frozen, x)


class NnxNet(nnx.Module):
    def __init__(self, mask=None):
        rngs = nnx.Rngs(0)
        conv = functools.partial(nnx.Conv, dtype=jnp.bfloat16, rngs=rngs)
        self.patch = conv(3, 8, (2, 2), 2, mask=mask)
        self.deep = conv(8, 8, (3, 3), feature_group_count=2)

    def __call__(self, x):
        return self.deep(self.patch(x))


@pytest.mark.exhaustive
def test_nnx_layers_keep_their_state():
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    model, floats = NnxNet(), NnxNet()
    run = nnx.jit(lambda model, x: model(x))
    report = quantize(model, {".*": SMALL}, rngs=nnx.Rngs(1))
    assert report.layers == {"deep": ".*", "patch": ".*"}
    assert isinstance(model.deep.conv_general_dilated, fbq_jax.nnx.FallbackConv)

    run(model, x)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: int(s.count) for path, s in stats.items()} == {"deep": 1, "patch": 1}
    frozen = fbq_jax.nnx.freeze(model, x)
    assert frozen.deep.kernel.shape == (3, 3, 4, 8)
    model.eval()
    y, exact = run(model, x), floats(x)
    assert jnp.all(run(frozen, x) == y)
    assert 1e-4 < oracle.relative(y, exact) < 0.03

    model.deep.conv_general_dilated = model.patch.conv_general_dilated
    with pytest.raises(ValueError, match="'deep' and 'patch' share one FallbackConv"):
        fbq_jax.nnx.fallback_stats(model)
    quantize(model, {".*": None})
    np.testing.assert_array_equal(model(x), exact)


def test_unsupported_nnx_layers_are_named():
    model = NnxNet(mask=jnp.ones((2, 2, 3, 8)))
    quantize(model, {".*": recipes.block})
    with pytest.raises(ValueError, match=r"no nnx.Conv with a mask, as 'patch' has"):
        fbq_jax.nnx.freeze(model, jnp.ones((1, 8, 8, 3)))

    @nnx.split_rngs(splits=2)
    @nnx.vmap(out_axes=-1)
    def stack(rngs):
        return nnx.Conv(3, 8, (2, 2), rngs=rngs)

    stacked = stack(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"shape \(2, 2, 3, 8, 2\), .* its axes first"):
        quantize(stacked, {".*": recipes.block})


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kind", with_first_fast([AxisType.Auto, AxisType.Explicit]))
def test_a_batch_on_four_devices_is_the_same_batch(kind):
    """Devices make the windows of their images and sum only the kernel's gradient."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x, w = heavy((8, 8, 8, 4)), heavy((3, 3, 4, 40), 1)
    theta = jnp.float32(4.0)

    @jax.jit
    def step(x, w, theta):
        def dot(*args, **kwargs):
            return dot_general(*args, recipe=SMALL, theta=theta, **kwargs)[0]

        def conv(x, w):
            return conv_general_dilated(
                dot, x, w, (1, 1), "SAME", dimension_numbers=NHWC
            )

        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(y)

    want = step(x, w, theta)
    cut = NamedSharding(mesh, P("data"))
    whole = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, cut), *jax.device_put((w, theta), whole)]
        run = step.lower(*args).compile()
        y, dx, dw = run(*args)
    assert y.sharding.is_equivalent_to(cut, 4)
    np.testing.assert_array_equal(y, want[0])
    np.testing.assert_array_equal(dx, want[1])
    assert oracle.relative(dw, want[2]) < 1e-5
    large = [
        (c.kind, c.size) for c in collectives(run) if c.size > 32
    ]  # larger than scales
    assert large == [("all-reduce", w.size)]


def test_out_sharding_is_that_of_the_output():
    """The output of a product over sharded channels would be ambiguous without it."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    x, w = heavy((2, 6, 6, 8)), heavy((3, 3, 8, 4), 1)
    sharding = P(None, "a", None, None)
    with jax.set_mesh(mesh):
        y = conv_general_dilated(
            lax.dot_general,
            *(jax.device_put(x, P(None, None, None, "a")), w, (1, 1), "SAME"),
            dimension_numbers=("NHWC", "HWIO", "NCHW"),
            out_sharding=sharding,
        )
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, sharding), 4)
    exact = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NCHW")
    )
    assert oracle.relative(y, exact) < 1e-6


ERRORS = [
    ({"batch_group_count": 2}, "takes batch_group_count=1; got 2"),
    (
        {"padding": "VALID", "rhs_dilation": (1, 4)},
        r"no window of \(3, 3\) fits an",
    ),
    (
        {"feature_group_count": 3, "out_sharding": P("a")},
        "takes out_sharding only if",
    ),
    ({"feature_group_count": 2}, "feature_group_count must divide .* 2 does not di"),
    ({"window_strides": (1,)}, "window_strides|strides"),
    ({"precision": "highest"}, "the recipe sets the precision"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_unsupported_options_are_named(options, message):
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    x, w = jnp.ones((2, 5, 6, 3)), jnp.ones((3, 3, 3, 6))
    with pytest.raises((TypeError, ValueError), match=message):
        fallback_conv(x, w, dimension_numbers=NHWC, **options)


def test_unsupported_layers_and_dtypes_are_named():
    local = nn.ConvLocal(4, (3,), conv_general_dilated=fallback_conv)
    with pytest.raises(ValueError, match=r"nn.ConvLocal has a kernel for each posi"):
        local.init(jax.random.key(0), jnp.ones((1, 8, 3)))
    with pytest.raises(TypeError, match="lhs is int8; a quantized dot takes bfloat16"):
        fallback_conv(jnp.ones((1, 2, 4), "int8"), jnp.ones((3, 2, 1)), (1,), "SAME")
    with pytest.raises(TypeError, match="lhs is a list; a quantized dot takes arrays"):
        fallback_conv([[[1.0]]], jnp.ones((1, 1, 1)), (1,), "SAME")
    with pytest.raises(TypeError, match="FallbackConv takes a dot_general, such as "):
        FallbackConv(recipes.block)


@pytest.mark.exhaustive
def test_an_empty_batch_has_an_empty_output():
    x, w = jnp.ones((0, 5, 6, 4)), jnp.ones((3, 3, 2, 8))
    y = fallback_conv(
        *(x, w, (1, 1), "SAME"),
        rhs_dilation=np.array([1, 2]),
        dimension_numbers=NHWC,
        feature_group_count=2,
    )
    assert y.shape == (0, 5, 6, 8)
