"""A layer stays in float where a map says that INT8 would be slower."""

import dataclasses
import functools
import warnings

import chex
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackConv,
    FallbackDot,
    FallbackEinsum,
    GatedMLP,
    RulesDot,
    assert_live,
    dispatch,
    dot_general,
    fallback_stats,
    freeze,
    fuses,
    nnx,
    recipes,
)
from fbq_jax.kernels.speed_map import SpeedMap
from fbq_jax.sharding import layer_names

MATMUL = (((1,), (0,)), ((), ()))
FLOAT = dataclasses.replace(recipes.fallback, where_slower="float")
BLOCK = dataclasses.replace(recipes.block, where_slower="float")
_SPEEDUPS = {(8, 16, 16): 0.5, (64, 16, 16): 2.0}
MAP = SpeedMap("Some GPU", "reference", {"fallback": _SPEEDUPS, "block": _SPEEDUPS})
# The prediction is below 1 up to 22 rows.
SLOW, FAST = 16, 32


@pytest.fixture(autouse=True)
def some_map(monkeypatch):
    """A map that calls fewer than 23 rows slower, and no earlier warnings."""
    monkeypatch.setattr(dispatch, "_map_for", lambda *_: MAP)
    layer_names.clear()


dense = functools.partial(nn.Dense, 16, use_bias=False, dtype=jnp.bfloat16)
stays_in_float = pytest.mark.filterwarnings("ignore:.*stays in float:UserWarning")


def operands(M, dtype=jnp.bfloat16, K=16):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (M, K), dtype)
    return x, jax.random.normal(keys[1], (K, 16), dtype)


def gradients(dot, *args):
    """The output, and the gradients of both operands."""

    def loss(x, w):
        y = dot(x, w)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    grads, y = jax.grad(loss, (0, 1), has_aux=True)(*args)
    return y, *grads


def same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@stays_in_float
@pytest.mark.parametrize("options", [{}, {"preferred_element_type": jnp.float32}])
def test_a_slower_product_is_lax_dot_general_to_the_bit(options):
    quantized = functools.partial(
        dot_general, dimension_numbers=MATMUL, recipe=FLOAT, **options
    )
    exact = functools.partial(lax.dot_general, dimension_numbers=MATMUL, **options)
    args = operands(SLOW)
    same_bits(gradients(lambda *x: quantized(*x)[0], *args), gradients(exact, *args))
    _, stats = quantized(*args, theta=0.25)
    assert stats.metric.shape == (1, 0, 0)
    assert (stats.rate, stats.theta, stats.next_theta) == (0.0, 0.25, 0.25)


def test_a_faster_product_is_quantized_as_without_the_option():
    args = operands(FAST)
    y, stats = dot_general(*args, MATMUL, recipe=FLOAT)
    expected, expected_stats = dot_general(*args, MATMUL)
    same_bits([y, *stats], [expected, *expected_stats])


def warnings_of(function, *args):
    """The texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in caught]


def test_a_layer_left_in_float_is_named_once_for_each_shape():
    model = nn.Sequential([dense(dot_general=FallbackDot(FLOAT))])
    x, _ = operands(SLOW)
    assert warnings_of(model.init, jax.random.key(0), x) == [
        "layers_0: a layer of M, K, N = 16, 16, 16 stays in float, not in INT8 by the "
        "recipe 'fallback': the map of Some GPU predicts 0.79 times bf16's speed, and "
        "where_slower='float'"
    ]
    variables = model.init(jax.random.key(0), x)
    assert not warnings_of(jax.jit(model.apply), variables, x)
    (text,) = warnings_of(jax.jit(model.apply), variables, x[:8])
    assert "M, K, N = 8, 16, 16 stays in float" in text


def test_a_machine_without_a_map_quantizes_and_says_so_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_map_for", lambda *_: "there is no map")
    dot = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=FLOAT)
    args = operands(SLOW)
    assert warnings_of(dot, *args) == [
        "where_slower='float' quantizes every layer: there is no map"
    ]
    assert not warnings_of(dot, *operands(8))
    same_bits(dot(*args)[:1], dot_general(*args, MATMUL)[:1])


@stays_in_float
@pytest.mark.parametrize("collection", ["fallback", "_overwrite_with_gradient"])
def test_linen_state_keeps_its_structure_and_counts_on(collection):
    x, _ = operands(SLOW)
    quantized = dense(dot_general=FallbackDot(collection=collection))
    layer = dense(dot_general=FallbackDot(FLOAT, collection))
    before = quantized.init(jax.random.key(0), x)
    chex.assert_trees_all_equal(before, layer.init(jax.random.key(0), x))

    def loss(variables):
        y, moved = layer.apply(variables, x, mutable=["fallback"])
        return jnp.sum(y), moved

    grads, moved = jax.grad(loss, has_aux=True, allow_int=True)(before)
    after = {**before, collection: {**grads, **moved}[collection]}
    old, new = (fallback_stats(v, collection) for v in (before, after))
    assert_live(old, new)
    assert (new["(root)"].rate, new["(root)"].theta) == (0.0, -1.0)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    # The state of a layer that was in float trains a quantized one, and the reverse.
    quantized.apply(after, x, mutable=[collection])


def nnx_layer(recipe):
    dot = nnx.FallbackDot(recipe)
    return flax.nnx.Linear(16, 16, dot_general=dot, rngs=flax.nnx.Rngs(0))


@stays_in_float
def test_nnx_state_keeps_its_structure_and_counts_on():
    x, _ = operands(SLOW, jnp.float32)
    layer = nnx_layer(FLOAT)
    structure = jax.tree.structure(flax.nnx.state(layer))
    y = flax.nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(y, x @ layer.kernel[...], rtol=1e-6)
    assert jax.tree.structure(flax.nnx.state(layer)) == structure
    stats = nnx.fallback_stats(layer)["(root)"]
    assert (stats.count, stats.rate, stats.theta) == (1, 0.0, -1.0)


@stays_in_float
def test_stacked_layers_are_looked_up_by_the_shape_of_one():
    """Under ``vmap``, and as a batch of products."""
    x, w = (jnp.stack([x] * 4) for x in operands(SLOW))
    batched = ((2,), (1,)), ((0,), (0,))
    y, stats = dot_general(x, w, batched, recipe=FLOAT)
    same_bits([y], [lax.dot_general(x, w, batched)])
    assert stats.metric.shape == (4, 0, 0)
    mapped = jax.vmap(lambda x, w: dot_general(x, w, MATMUL, recipe=FLOAT)[0])(x, w)
    same_bits([mapped], [y])


@stays_in_float
def test_layers_inside_a_scan_stay_in_float_and_count_on():
    def stack(layer, x):
        options = {"split_rngs": {"params": True}, "length": 3}
        axes = {"params": 0, "fallback": 0}
        return nn.scan(lambda m, x: (m(x), None), axes, **options)(layer, x)[0]

    layer, (x, _) = dense(dot_general=FallbackDot(FLOAT)), operands(SLOW)
    variables = nn.init(stack, layer)(jax.random.key(0), x)
    y, moved = nn.apply(stack, layer, mutable=["fallback"])(variables, x)
    same_bits([y], [nn.apply(stack, dense())({"params": variables["params"]}, x)])
    (stats,) = fallback_stats(moved).values()
    assert stats.count.tolist() == [1, 1, 1]


def test_einsums_convolutions_and_rules_are_left_in_float_too(recwarn):
    warnings.simplefilter("always")
    x, w = operands(SLOW)
    einsum = FallbackEinsum(FallbackDot(FLOAT))
    same_bits([einsum("td,df->tf", x, w)], [x @ w])
    rules = dense(dot_general=RulesDot({".*": FLOAT}))
    variables = rules.init(jax.random.key(0), x)
    same_bits([rules.apply(variables, x)], [dense().apply(variables, x)])
    images = operands(64, K=4)[0].reshape(1, 8, 8, 4)
    kernel = jax.random.normal(jax.random.key(2), (2, 2, 4, 16), jnp.bfloat16)
    conv = FallbackConv(FallbackDot(FLOAT))  # 16 windows of 16 values
    layout = ("NHWC", "HWIO", "NHWC")
    y = conv(images, kernel, (2, 2), "VALID", dimension_numbers=layout)
    exact = lax.conv_general_dilated(
        images, kernel, (2, 2), "VALID", dimension_numbers=layout
    )
    np.testing.assert_allclose(y, exact, rtol=0.02, atol=0.02)
    # Of the einsum, which is in no layer, and of the layer with rules.
    assert len(recwarn) == 2


@stays_in_float
def test_frozen_layers_refuse_the_option():
    x, _ = operands(SLOW)
    message = "where_slower='float', and a frozen layer always multiplies by its codes"
    layer = dense(dot_general=FallbackDot(BLOCK))
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=message):
        freeze(layer, variables, x)
    quantizing = dense(dot_general=FallbackDot(recipes.block))
    frozen = freeze(quantizing, variables, x)
    same_bits([quantizing.apply(frozen, x)], [quantizing.apply(variables, x)])
    with pytest.raises(ValueError, match=message):
        nnx.freeze(nnx_layer(BLOCK), x)


def test_fused_layers_refuse_the_option():
    with pytest.raises(ValueError, match=r"takes .* and where_slower='quantize'"):
        GatedMLP(8, dot_general=FallbackDot(FLOAT)).init(
            jax.random.key(0), operands(SLOW)[0]
        )
    assert fuses(recipes.fallback)
    assert not fuses(FLOAT)
    with pytest.raises(TypeError, match=r"fuses takes a Recipe.*got 'fallback'"):
        fuses("fallback")


@stays_in_float
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    ("axis_type", "is_manual", "is_quantized"),
    [
        (AxisType.Auto, False, True),  # 32 rows of both devices
        (AxisType.Explicit, False, False),  # 16 rows of each
        (AxisType.Auto, True, False),
    ],
)
def test_sharded_layers_count_by_device_unless_axes_are_automatic(
    axis_type, is_manual, is_quantized
):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))

    def product(x, w):
        return dot_general(x, w, MATMUL, recipe=FLOAT)[0]

    if is_manual:
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        product = jax.shard_map(product, mesh=mesh, check_vma=False, **specs)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for spec in (P("data"), P())]
        arrays = map(jax.device_put, operands(FAST), shardings)
        text = str(jax.jit(product).trace(*arrays).jaxpr)
    assert ("custom_vjp" in text) == is_quantized
