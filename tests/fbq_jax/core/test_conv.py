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

X, W, IMAGES = (2, 9, 8, 3), (3, 3, 3, 5), (2, 5, 4, 3)
# Shapes of the input and the kernel, strides, padding, and further options.
CASES = {
    "patches": (X, (4, 4, 3, 5), (4, 4), "VALID", {}),
    "1x1": (IMAGES, (1, 1, 3, 5), (1, 1), "SAME", {}),
    "1x1 in strides": (IMAGES, (1, 1, 3, 5), (2, 1), "VALID", {}),
    "3x3": (IMAGES, W, (1, 1), "SAME", {}),
    "7x3 in strides": (X, (7, 3, 3, 5), (2, 3), "SAME_LOWER", {}),
    "dilated": (X, W, (3, 1), "SAME", {"rhs_dilation": np.array([2, 3])}),
    "transposed": (IMAGES, W, (1, 2), [(2, 1), (0, 3)], {"lhs_dilation": (2, 3)}),
    "cropped": (X, W, (1, 2), [(-1, 2), (1, -2)], {}),
    "1-D": ((2, 9, 3), (3, 3, 5), (1,), [(2, 0)], {"dims": ("NWC", "WIO", "NWC")}),
    "3-D": (
        *((2, 3, 5, 3, 4), (2, 3, 1, 2, 3), (1, 2, 1), "SAME"),
        {"dims": ("NCDHW", "DHWOI", "DNHWC")},
    ),
    "defaults": ((2, 3, 5, 4), (6, 3, 3, 2), (1, 1), "SAME", {"dims": None}),
    "groups": ((2, 5, 4, 6), (3, 3, 2, 9), (1, 2), "SAME", {"feature_group_count": 3}),
    "groups elsewhere": (
        *((6, 5, 4, 2), (3, 9, 2, 2), (2, 1), "VALID"),
        {"feature_group_count": 3, "dims": ("CHWN", "HOWI", "HCNW")},
    ),
    "no batch": ((0, 5, 4, 3), W, (1, 1), "SAME", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_mean_what_they_do_for_jax(case):
    """With a float dot, which leaves the windows as the only difference."""
    x_shape, w_shape, strides, padding, options = CASES[case]
    options = {"window_strides": strides, "padding": padding, "dims": NHWC, **options}
    options["dimension_numbers"] = options.pop("dims")
    x, w = heavy(x_shape, 0), heavy(w_shape, 1)

    @functools.partial(jax.jit, static_argnums=0)
    def run(conv, x, w):
        y, vjp = jax.vjp(functools.partial(conv, **options), x, w)
        return y, *vjp(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    ours = functools.partial(conv_general_dilated, lax.dot_general)
    results = run(ours, x, w), run(lax.conv_general_dilated, x, w)
    for got, exact in zip(*results, strict=True):
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


@pytest.mark.parametrize("kind", with_first_fast(reversed(WINDOWS)))
def test_values_and_gradients_are_those_of_the_dot_of_windows(kind):
    """Bit-equal, as windows are copies; and the oracle's codes in float64."""
    size, stride, padding, around = WINDOWS[kind]
    x, w = heavy((2, 8, 12, 5), 0), heavy((size, size, 5, 40), 1)
    pads = [(0, 0), (around, around), (around, around), (0, 0)]
    patches = windows(np.pad(x, pads), size, stride)
    positions = np.pad(np.arange(x.size).reshape(x.shape), pads, constant_values=-1)
    theta = 30.0
    key = jax.random.key(0)
    dot = functools.partial(dot_general, recipe=SMALL, theta=theta, key=key)

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
def test_linen_layer_matches_flax_with_another_recipe():
    """Passed as an object or a class; without a batch dimension, or with two."""
    x = jax.random.normal(jax.random.key(1), (2, 3, 10, 16), jnp.bfloat16)
    op = FallbackConv(FallbackDot(recipes.rowwise))
    conv = functools.partial(nn.Conv, 24, 3, padding="CAUSAL", dtype=jnp.bfloat16)
    layer, plain = conv(conv_general_dilated=op), conv()
    variables, floats = (m.init(jax.random.key(0), x[0, 0]) for m in (layer, plain))
    jax.tree.map(np.testing.assert_array_equal, variables["params"], floats["params"])
    train = jax.jit(functools.partial(layer.apply, mutable=["fallback"]))
    y, state = train(variables, x)
    exact = plain.apply(floats, x)
    assert (y.dtype, y.shape) == (exact.dtype, exact.shape)
    assert 1e-4 < oracle.relative(y, exact) < 0.02
    assert fallback_stats(state)["(root)"].count == 1
    serve = [
        jax.jit(model.apply)({**variables, **state}, x)
        for model in (layer, conv(conv_general_dilated_cls=lambda: op))
    ]
    np.testing.assert_array_equal(*serve)


def test_what_is_saved_for_the_backward_pass():
    """Codes of windows, one per value without overlap; under remat, the input."""
    x = jax.random.normal(jax.random.key(1), (2, 16, 32, 8))

    def saved(module, size, stride):
        """The bytes per value of x: all, and those of the codes of the kernel."""
        layer = module(32, (size, size), stride, conv_general_dilated=CONV)
        variables = layer.init(jax.random.key(0), x)

        def apply(params, x):
            variables_ = {**variables, "params": params}
            return layer.apply(variables_, x, mutable=["fallback"])[0]

        backward = functools.partial(jax.vjp, apply)
        _, vjp = jax.eval_shape(backward, variables["params"], x)
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(vjp))
        return nbytes / x.size, size * size * 8 * 32 / x.size

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


IMAGE = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))


@pytest.mark.exhaustive
def test_rules_reach_convolutions():
    dot = RulesDot({"patch": None, "deep.*": SMALL, "head": None})
    net = Net(FallbackConv(dot))
    report = dot.report(net, jax.random.key(0), IMAGE)
    assert report.layers == {"patch": "patch", "deep/0": "deep.*"}
    assert report.unused_rules == ("head",)
    assert report.unmatched_layers == ("forgotten",)
    variables = jax.jit(net.init)(jax.random.key(0), IMAGE)
    assert list(fallback_stats(variables)) == ["deep/0"]
    floats = Net(FallbackConv(RulesDot({"deep/.": None})))
    y, exact = (
        m.apply({"params": variables["params"]}, IMAGE) for m in (floats, Net(None))
    )
    np.testing.assert_array_equal(y, exact)


@pytest.mark.exhaustive
def test_frozen_layers_compute_what_they_trained():
    """Also with a mask and with feature groups."""
    net = Net(CONV)
    trained = jax.jit(net.init)(jax.random.key(0), IMAGE)
    for state in trained["fallback"].values():
        state["dot_general"]["theta"] = jnp.float32(2.0)
    frozen = freeze(net, trained, IMAGE)
    assert frozen["params"]["deep/0"]["kernel"].shape == (3, 3, 4, 8)
    assert len(jax.tree.leaves(frozen["params"]["patch"])) == 1  # the bias
    run = jax.jit(net.apply)
    np.testing.assert_array_equal(run(frozen, IMAGE), run(trained, IMAGE))
    with pytest.raises(ValueError, match=r"layer 'patch' is frozen .* leaves it unq"):
        Net(None).apply(frozen, IMAGE)


def test_unsupported_nnx_layers_are_named():
    mask, rngs = jnp.ones((2, 2, 3, 8)), nnx.Rngs(0)
    masked = nnx.Conv(3, 8, (2, 2), 2, mask=mask, rngs=rngs)
    model = nnx.Sequential(masked)
    quantize(model, {".*": recipes.block})
    with pytest.raises(ValueError, match=r"no nnx.Conv with a mask, as 'layers/0' has"):
        fbq_jax.nnx.freeze(model, jnp.ones((1, 8, 8, 3)))

    @nnx.split_rngs(splits=2)
    @nnx.vmap(out_axes=-1)
    def stack(rngs):
        return nnx.Conv(3, 8, (2, 2), rngs=rngs)

    with pytest.raises(ValueError, match=r"shape \(2, 2, 3, 8, 2\), .* its axes first"):
        quantize(stack(rngs), {".*": recipes.block})


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kind", with_first_fast([AxisType.Auto, AxisType.Explicit]))
def test_a_batch_on_four_devices_is_the_same_batch(kind):
    """Devices make the windows of their images and sum only the kernel's gradient."""
    x, w = heavy((8, 8, 8, 4)), heavy((3, 3, 4, 40), 1)

    def dot(*args, **kwargs):
        options = {"recipe": SMALL, "theta": 4.0, "key": jax.random.key(0)}
        return dot_general(*args, **options, **kwargs)[0]

    def conv(x, w):
        return conv_general_dilated(dot, x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    @jax.jit
    def step(x, w):
        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(y)

    want = step(x, w)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        args = jax.device_put(x, cut), jax.device_put(w, whole)
        run = step.lower(*args).compile()
        y, dx, dw = run(*args)
    assert y.sharding.is_equivalent_to(cut, 4)
    np.testing.assert_array_equal(y, want[0])
    np.testing.assert_array_equal(dx, want[1])
    assert oracle.relative(dw, want[2]) < 1e-5
    # All others are as small as scales.
    large = [(c.kind, c.size) for c in collectives(run) if c.size > 32]
    assert large == [("all-reduce", w.size)]


def test_out_sharding_is_that_of_the_output():
    """The output of a product over sharded channels would be ambiguous without it."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    x, w = heavy((2, 6, 6, 8)), heavy((3, 3, 8, 4), 1)
    options = {"dimension_numbers": ("NHWC", "HWIO", "NCHW")}
    exact = lax.conv_general_dilated(x, w, (1, 1), "SAME", **options)
    sharding = P(None, "a", None, None)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, P(None, None, None, "a"))
        args = lax.dot_general, x, w, (1, 1), "SAME"
        y = conv_general_dilated(*args, **options, out_sharding=sharding)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, sharding), 4)
    assert oracle.relative(y, exact) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_group_count": 2}, "takes batch_group_count=1; got 2"),
        (
            {"padding": "VALID", "rhs_dilation": (1, 4)},
            r"no window of \(3, 3\) fits an",
        ),
        ({"feature_group_count": 3, "out_sharding": P("a")}, "takes out_sharding only"),
        (
            {"feature_group_count": 2},
            "feature_group_count must divide .* 2 does not di",
        ),
        ({"window_strides": (1,)}, "window_strides|strides"),
        ({"precision": "highest"}, "the recipe sets the precision"),
        (
            {"lhs": jnp.ones((2, 5, 6, 3), "int8")},
            "lhs is int8; a quantized dot takes b",
        ),
        ({"lhs": [[[[1.0]]]]}, "lhs is a list; a quantized dot takes arrays"),
    ],
)
def test_unsupported_options_are_named(options, message):
    arguments = {"lhs": jnp.ones((2, 5, 6, 3)), "rhs": jnp.ones((3, 3, 3, 6))}
    arguments |= {"window_strides": (1, 1), "padding": "SAME", **options}
    with pytest.raises((TypeError, ValueError), match=message):
        fallback_conv(**arguments, dimension_numbers=NHWC)


def test_a_layer_with_a_kernel_for_each_position_is_named():
    local = nn.ConvLocal(4, (3,), conv_general_dilated=fallback_conv)
    with pytest.raises(ValueError, match=r"nn.ConvLocal has a kernel for each posi"):
        local.init(jax.random.key(0), jnp.ones((1, 8, 3)))
