"""A frozen model is the trained one, bit for bit, in half of bfloat16's bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from safetensors import flax as safetensors

import fbq_jax
from fbq_jax import FLOAT_GEMM, FallbackDot, Gemm, Recipe, fallback_dot, recipes
from fbq_jax.frozen import FrozenKernel, FrozenWeight

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
    """Variables whose thresholds, counts and kernels are no longer the first."""
    variables = jax.jit(model.init)(jax.random.key(1), x)
    step = jax.jit(lambda variables: model.apply(variables, x, mutable=["fallback"])[1])
    for _ in range(2):
        variables = {**variables, **step(variables)}
    return variables


@pytest.fixture(scope="module")
def scanned():
    model = Stack()
    variables = trained(model, X[:, :8])
    return model, variables, fbq_jax.freeze(model, variables, X[:, :8])


def same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert jnp.all(jnp.isfinite(a))
    return bool(jnp.all(a == b))


W_IS_STOCHASTIC = Recipe(
    block=32, fwd=Gemm(rhs="stochastic"), dlhs=Gemm(lhs="stochastic", rhs="stochastic")
)


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        Recipe(block=(32, 64, 128), criterion="l1_rel"),
        W_IS_STOCHASTIC,
        *(recipes.NAMED[name] for name in ("switchback", "per_tensor", "aqt_int8")),
    ],
    ids=["fallback", "l1_rel", "stochastic", "switchback", "per_tensor", "aqt"],
)
def test_serves_what_was_trained(recipe):
    model = Mlp(recipe)
    variables = trained(model)
    frozen = fbq_jax.freeze(model, variables, jax.ShapeDtypeStruct(X.shape, X.dtype))
    expected = jax.jit(model.apply)(variables, X)
    assert same_bits(jax.jit(model.apply)(frozen, X), expected)
    # Not the noise of a later step's W, which another count would give.
    if recipe is W_IS_STOCHASTIC:
        later = trained(model)
        later["fallback"]["Dense_0"]["dot_general"]["count"] += jnp.uint32(1)
        assert not same_bits(jax.jit(model.apply)(later, X), expected)


def test_every_named_recipe_is_served():
    """One product is enough here: W's codes are those of the forward GEMM's."""
    x = jax.random.normal(jax.random.key(3), (40, 80))
    for recipe in recipes.NAMED.values():
        layer = nn.Dense(48, dtype=jnp.bfloat16, dot_general=FallbackDot(recipe))
        variables = layer.init(jax.random.key(1), x)
        state = {**variables["fallback"]["dot_general"], "theta": jnp.float32(2.0)}
        variables = {**variables, "fallback": {"dot_general": state}}
        frozen = fbq_jax.freeze(layer, variables, x)
        assert same_bits(layer.apply(frozen, x), layer.apply(variables, x))


def test_layers_under_scan(scanned):
    model, variables, frozen = scanned
    x = X[:, :8]
    served = jax.jit(model.apply)(frozen, x)
    assert same_bits(served, jax.jit(model.apply)(variables, x))
    assert fbq_jax.fallback_stats(frozen).keys() == (
        fbq_jax.fallback_stats(variables).keys()
    )
    weight = frozen["fallback"]["layers"]["mlp"]["gate_up"]["dot_general"]["weight"]
    assert isinstance(weight, FrozenWeight)
    assert weight.codes.main.codes.shape == (3, 1, 96, 80)
    kernel = frozen["params"]["layers"]["mlp"]["gate_up"]["kernel"]
    assert isinstance(kernel, FrozenKernel)
    assert kernel.shape == (80, 96)


def test_attention():
    attention = nn.MultiHeadAttention(
        num_heads=4,
        qkv_dot_general=FallbackDot(RECIPE),
        out_dot_general=FallbackDot(RECIPE),
    )
    x = X[:, :8]
    variables = trained(attention, x)
    frozen = fbq_jax.freeze(attention, variables, x)
    assert same_bits(attention.apply(frozen, x), attention.apply(variables, x))
    assert not jax.tree.leaves(frozen["params"]["query"]["kernel"])


def test_half_the_bytes_of_bfloat16():
    layer = nn.Dense(512, use_bias=False, dot_general=fallback_dot)
    variables = trained(layer, jnp.ones((8, 512)) + jnp.eye(8, 512))
    frozen = fbq_jax.freeze(layer, variables, jax.ShapeDtypeStruct((8, 512), "float32"))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    in_bfloat16 = 2 * variables["params"]["kernel"].size
    assert 0.5 <= nbytes / in_bfloat16 < 0.501


def like(model, x):
    key = jax.random.key(0)
    return jax.eval_shape(lambda: fbq_jax.freeze(model, model.init(key, x), x))


def test_saves_and_loads_with_orbax(scanned, tmp_path):
    model, _, frozen = scanned
    x = X[:, :8]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "frozen", frozen)
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "frozen", like(model, x))
    assert same_bits(jax.jit(model.apply)(loaded, x), jax.jit(model.apply)(frozen, x))


def test_saves_and_loads_with_safetensors(scanned, tmp_path):
    model, _, frozen = scanned
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
    variables = trained(layer)
    return layer, variables, fbq_jax.freeze(layer, variables, X)


def test_untrained_layers_are_refused():
    model = Mlp()
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="no threshold yet .* DenseGeneral_0, DenseG"):
        fbq_jax.freeze(model, variables, X)


def test_a_frozen_model_does_not_train(dense):
    layer, _, frozen = dense
    with pytest.raises(ValueError, match=r"frozen and does not train.*mutable"):
        layer.apply(frozen, X, mutable=["fallback"])
    with pytest.raises(ValueError, match="a frozen model does not train: it has no gr"):
        jax.grad(lambda x: jnp.sum(layer.apply(frozen, x)))(X)
    fused = fbq_jax.NormDense(48, dot_general=FallbackDot(RECIPE))
    frozen = fbq_jax.freeze(fused, trained(fused), X)
    with pytest.raises(ValueError, match="a frozen model does not train: it has no gr"):
        jax.grad(lambda x: jnp.sum(fused.apply(frozen, x)))(X)


def test_what_belongs_together_stays_together(dense):
    layer, variables, frozen = dense
    with pytest.raises(ValueError, match="has no codes in the collection 'fallback'"):
        layer.apply({**frozen, "fallback": variables["fallback"]}, X)
    with pytest.raises(ValueError, match="both the codes of a frozen weight and a ker"):
        layer.apply({**frozen, "params": variables["params"]}, X)
    with pytest.raises(ValueError, match="needs the FallbackDot that it was trained"):
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


class Odd(nn.Module):
    """What it does with its weight is not a Dense's business."""

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
    variables = trained(plain)
    frozen = fbq_jax.freeze(plain, variables, X)
    assert same_bits(plain.apply(frozen, X), plain.apply(variables, X))
    with pytest.raises(ValueError, match="does not run: .root"):
        fbq_jax.freeze(plain, variables, X, method="without")
    with pytest.raises(ValueError, match="whose weight is their parameter 'kernel'"):
        fbq_jax.freeze(Odd("weight"), trained(Odd("weight")), X)
    with pytest.raises(ValueError, match="reads its kernel in another way"):
        fbq_jax.freeze(Odd("kernel", regularized=True), variables, X)
