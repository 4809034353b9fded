"""A frozen model is the trained one, bit for bit, in half of bfloat16's bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from safetensors import flax as safetensors

import fbq_jax
from fbq_jax import (
    FLOAT_GEMM,
    FallbackDot,
    Gemm,
    Recipe,
    fallback_dot,
    gemms,
    recipes,
)
from fbq_jax.frozen import FrozenKernel, FrozenWeight, quantize_weight
from fbq_jax.operands import Spec

ocp = pytest.importorskip("orbax.checkpoint")

RECIPE = Recipe(block=32)
X = jax.random.normal(jax.random.key(0), (2, 24, 80)).at[0, 3, 5].set(50.0)


class Mlp(nn.Module):
    """Every kind of layer, in bfloat16 but for one."""

    recipe: Recipe = RECIPE

    @nn.compact
    def __call__(self, x):
        dot = FallbackDot(self.recipe)
        y = nn.DenseGeneral((4, 24), dtype=jnp.bfloat16, dot_general=dot)(x)
        y = nn.silu(y)
        y = nn.DenseGeneral(80, axis=(-2, -1), dtype=jnp.bfloat16, dot_general=dot)(y)
        # Without a dtype of its own, and without a bias: the kernel's alone.
        y = nn.Dense(80, use_bias=False, dot_general=dot)(y.astype(jnp.float32))
        return nn.Dense(8, dtype=jnp.bfloat16)(y)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        dot = FallbackDot(RECIPE)
        x = x + fbq_jax.NormDense(80, use_bias=True, dot_general=dot, name="qkv")(x)
        x = x + fbq_jax.GatedMLP(48, dot_general=dot, name="mlp")(x)
        return x + nn.Dense(80, dot_general=dot, name="out")(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0, "fallback": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(name="layers")(x, None)[0]


def trained(model, x=X):
    """Variables after two training forwards, and the output of a third."""
    variables = jax.jit(model.init)(jax.random.key(1), x)
    forward = jax.jit(lambda variables: model.apply(variables, x, mutable=["fallback"]))
    for _ in range(2):
        variables = {**variables, **forward(variables)[1]}
    return variables, forward(variables)[0]


@pytest.fixture(scope="module")
def scanned():
    model = Stack()
    variables, y = trained(model, X[:, :8])
    return model, variables, y, fbq_jax.freeze(model, variables, X[:, :8])


def same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert jnp.all(jnp.isfinite(a))
    return bool(jnp.all(a == b))


def test_serves_what_was_trained():
    model = Mlp()
    variables, y = trained(model)
    frozen = fbq_jax.freeze(model, variables, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert same_bits(jax.jit(model.apply)(frozen, X), y)
    params = variables["params"]
    assert frozen["params"]["Dense_1"]["kernel"] is params["Dense_1"]["kernel"]


STOCHASTIC_W = Recipe(
    block=32, fwd=Gemm(rhs="stochastic"), dlhs=Gemm(lhs="stochastic", rhs="stochastic")
)
FORWARDS = {
    (recipe.fwd, recipe.block, recipe.criterion, recipe.bound): recipe
    for recipe in (
        *recipes.NAMED.values(),
        Recipe(block=(32, 64, 128), criterion="l1_rel"),
        STOCHASTIC_W,
    )
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_forward_is_served(dtype):
    x = X.reshape(1, -1, 80).astype(dtype)
    w = jax.random.normal(jax.random.key(2), (80, 144)).astype(dtype)
    theta, seed = jnp.float32(2.0), jnp.uint32(7)
    assert len(FORWARDS) > 7
    for recipe in FORWARDS.values():
        spec = Spec(recipe, dtype, dtype, dtype, None)
        weight = quantize_weight(
            w, (((2,), (0,)), ((), ())), seed, recipe=recipe, implementation=None
        )
        y, _ = gemms.matmul(spec, x, w[None], theta, seed)
        z, _ = gemms.matmul(spec, x, weight.codes.main, theta, seed)
        assert same_bits(z, y)
        served = weight.codes.mT.dequantize()[0]
        error = jnp.linalg.norm(served - w.astype(jnp.float32))
        assert error < 0.03 * jnp.linalg.norm(served)


def test_layers_under_scan(scanned):
    model, variables, y, frozen = scanned
    assert same_bits(jax.jit(model.apply)(frozen, X[:, :8]), y)
    before, after = (fbq_jax.fallback_stats(v) for v in (variables, frozen))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))
    weight = frozen["fallback"]["layers"]["mlp"]["gate_up"]["dot_general"]["weight"]
    assert isinstance(weight, FrozenWeight)
    assert weight.codes.main.codes.shape == (3, 1, 96, 80)
    kernel = frozen["params"]["layers"]["mlp"]["gate_up"]["kernel"]
    assert isinstance(kernel, FrozenKernel)
    assert kernel.shape == (80, 96)


def test_half_the_bytes_of_bfloat16(scanned):
    _, variables, _, frozen = scanned
    for path, kernel in flatten_dict(variables["params"]).items():
        if path[-1] != "kernel":
            continue
        state = flatten_dict(frozen["fallback"])[*path[:-1], "dot_general", "weight"]
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        # A scale is 4 bytes, for the 32 x 32 codes of a block.
        assert 0.5 < nbytes / (2 * kernel.size) < 0.504
        assert not jax.tree.leaves(flatten_dict(frozen["params"])[path])


def like(model, x):
    key = jax.random.key(0)
    return jax.eval_shape(lambda: fbq_jax.freeze(model, model.init(key, x), x))


def test_saves_and_loads_with_orbax(scanned, tmp_path):
    model, _, y, frozen = scanned
    x = X[:, :8]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "frozen", frozen)
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "frozen", like(model, x))
    assert same_bits(jax.jit(model.apply)(loaded, x), y)


def test_saves_and_loads_with_safetensors(scanned, tmp_path):
    model, *_, frozen = scanned
    x = X[:, :8]
    name = jax.tree_util.keystr
    arrays = {name(path): leaf for path, leaf in jax.tree.leaves_with_path(frozen)}
    safetensors.save_file(arrays, tmp_path / "frozen.safetensors")
    arrays = safetensors.load_file(tmp_path / "frozen.safetensors")
    loaded = jax.tree.map_with_path(lambda path, _: arrays[name(path)], like(model, x))
    jax.tree.map(np.testing.assert_array_equal, loaded, frozen)
    assert jax.tree.structure(loaded) == jax.tree.structure(frozen)


@pytest.fixture(scope="module")
def dense():
    layer = nn.Dense(48, dot_general=FallbackDot(RECIPE))
    variables, _ = trained(layer)
    return layer, variables, fbq_jax.freeze(layer, variables, X)


def test_untrained_layers_are_refused(dense):
    layer, variables, _ = dense
    untrained = {**variables["fallback"]["dot_general"], "theta": jnp.float32(-1.0)}
    variables = {**variables, "fallback": {"dot_general": untrained}}
    with pytest.raises(ValueError, match=r"no threshold yet .* in: \(root\)\."):
        fbq_jax.freeze(layer, variables, X)


def test_a_frozen_model_does_not_train(dense, scanned):
    layer, _, frozen = dense
    with pytest.raises(ValueError, match=r"frozen and does not train.*mutable"):
        layer.apply(frozen, X, mutable=["fallback"])
    with pytest.raises(ValueError, match="a frozen model does not train: it has no gr"):
        jax.grad(lambda x: jnp.sum(layer.apply(frozen, x)))(X)
    model, *_, frozen = scanned
    with pytest.raises(ValueError, match="a frozen model does not train: it has no gr"):
        jax.grad(lambda x: jnp.sum(model.apply(frozen, x)))(X[:, :8])


def test_what_belongs_together_stays_together(dense):
    layer, variables, frozen = dense
    with pytest.raises(ValueError, match="has no codes in the collection 'fallback'"):
        layer.apply({**frozen, "fallback": variables["fallback"]}, X)
    with pytest.raises(ValueError, match="both the codes of a frozen weight and a ker"):
        layer.apply({**frozen, "params": variables["params"]}, X)
    with pytest.raises(ValueError, match="model multiplies in floats th"):
        nn.Dense(48).apply(frozen, X)
    with pytest.raises(ValueError, match="use the recipe that it was trained with"):
        nn.Dense(48, dot_general=fallback_dot).apply(frozen, X)
    with pytest.raises(ValueError, match="freeze takes a model once"):
        fbq_jax.freeze(layer, frozen, X)
    with pytest.raises(ValueError, match="found no state of a FallbackDot"):
        fbq_jax.freeze(layer, {"params": variables["params"]}, X)


def test_a_forward_in_floats_has_no_codes():
    recipe = dataclasses.replace(recipes.rowwise, fwd=FLOAT_GEMM)
    layer = nn.Dense(48, dot_general=FallbackDot(recipe))
    variables = layer.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"'\(root\)' has no codes to freeze"):
        fbq_jax.freeze(layer, variables, X)


def test_a_layer_that_is_called_twice():
    layer = nn.Dense(80, dot_general=FallbackDot(RECIPE))

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = layer.copy(name="inner")
            return inner(inner(x))

    model = Twice()
    variables, _ = trained(model)
    frozen = fbq_jax.freeze(model, variables, X)
    expected = jax.jit(model.apply)(variables, X)
    assert same_bits(jax.jit(model.apply)(frozen, X), expected)


class Odd(nn.Module):
    """A layer that is none of Flax's."""

    name_of_weight: str
    regularized: bool = False

    @nn.compact
    def __call__(self, x):
        w = self.param(self.name_of_weight, nn.initializers.lecun_normal(), (80, 48))
        penalty = jnp.sum(w**2) if self.regularized else 0.0
        return fallback_dot(x, w, (((2,), (0,)), ((), ()))) + penalty

    @nn.compact
    def without(self, x):
        return x


def test_layers_of_ones_own():
    plain = Odd("kernel")
    variables, y = trained(plain)
    frozen = fbq_jax.freeze(plain, variables, X)
    assert same_bits(jax.jit(plain.apply)(frozen, X), y)
    with pytest.raises(ValueError, match=r"does not run: \(root\)"):
        fbq_jax.freeze(plain, variables, X, method="without")
    with pytest.raises(ValueError, match="whose weight is their parameter 'kernel'"):
        fbq_jax.freeze(Odd("weight"), {**variables, "params": {"weight": X}}, X)
    with pytest.raises(ValueError, match="reads its kernel in another way"):
        fbq_jax.freeze(Odd("kernel", regularized=True), variables, X)
