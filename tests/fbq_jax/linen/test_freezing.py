"""A frozen Linen model computes what the trained one does, bit for bit."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization
from jax.experimental import io_callback

import fbq_jax
from fbq_jax import (
    FLOAT_GEMM,
    Einsum,
    FallbackDot,
    FallbackEinsum,
    GatedMLP,
    Gemm,
    MoEMLP,
    NormDense,
    Recipe,
    Routing,
    SmoothSwiGLU,
    fallback_dot,
    recipes,
)
from tests import oracle
from tests.marks import rows_with_first_fast, with_first_fast

RECIPE, BLOCK = Recipe(block=32), FallbackDot(recipes.block)
X = jax.random.normal(jax.random.key(0), (2, 24, 80)).at[0, 3, 5].set(50.0)
SQUARE = X[..., :32]


class Mlp(nn.Module):
    """Every kind of layer; all compute in bfloat16 except for one."""

    recipe: Recipe = RECIPE

    @nn.compact
    def __call__(self, x):
        dot = FallbackDot(self.recipe)
        y = nn.DenseGeneral((4, 24), dtype=jnp.bfloat16, dot_general=dot)(x)
        y = nn.silu(y)
        y = nn.DenseGeneral(80, axis=(-2, -1), dtype=jnp.bfloat16, dot_general=dot)(y)
        # Without a dtype and a bias, the dtype of the kernel decides.
        y = nn.Dense(80, use_bias=False, dot_general=dot)(y.astype(jnp.float32))
        return nn.Dense(8, dtype=jnp.bfloat16)(y)


def as_trained(model, x):
    """Variables of a later step, without compiling training steps."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = {
        "params": jax.tree.map(
            lambda p: random.normal(0.0, 0.1, p.shape).astype(p.dtype),
            shapes["params"],
        ),
        "fallback": jax.tree.map(_later, shapes["fallback"]),
    }
    return jax.device_put(variables)


def _later(scalar):
    """A theta or rate of 2.0; a count or seed of 2, or from 2 on for a stack."""
    if jnp.issubdtype(scalar.dtype, jnp.floating):
        return np.full(scalar.shape, 2, scalar.dtype)
    return np.arange(2, 2 + scalar.size, dtype=scalar.dtype).reshape(scalar.shape)


def same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert jnp.all(jnp.isfinite(a))
    return bool(jnp.all(a == b))


STOCHASTIC_W = Recipe(
    block=32, fwd=Gemm(rhs="stochastic"), dlhs=Gemm(lhs="stochastic", rhs="stochastic")
)
# One recipe for each kind of forward pass.
FORWARDS = {
    (recipe.fwd, recipe.block, recipe.criterion, recipe.bound): recipe
    for recipe in (
        *(RECIPE, STOCHASTIC_W, Recipe(block=(32, 64, 128), criterion="l1_rel")),
        *recipes.NAMED.values(),
    )
    if not recipe.fwd.in_floats
}


@pytest.mark.parametrize("recipe", with_first_fast(FORWARDS.values()))
def test_a_frozen_model_computes_what_was_trained(recipe):
    model = Mlp(recipe)
    variables = as_trained(model, X)
    frozen = fbq_jax.freeze(model, variables, jax.ShapeDtypeStruct(X.shape, X.dtype))
    training = jax.jit(lambda v: model.apply(v, X, mutable=["fallback"]))
    assert same_bits(jax.jit(model.apply)(frozen, X), training(variables)[0])
    params = variables["params"]
    assert frozen["params"]["Dense_1"]["kernel"] is params["Dense_1"]["kernel"]


@pytest.mark.parametrize("recipe", with_first_fast([RECIPE, recipes.fp8_row_block_lhs]))
def test_flax_serializes_frozen_variables(recipe):
    """Into a tree of shapes, from bytes and from dictionaries."""
    model = Mlp(recipe)
    frozen = fbq_jax.freeze(model, as_trained(model, X), X)
    like = jax.eval_shape(lambda: frozen)
    state = serialization.to_state_dict(frozen)
    assert state["params"]["DenseGeneral_0"]["kernel"] == {}
    for restored in (
        serialization.from_bytes(like, serialization.to_bytes(frozen)),
        serialization.from_state_dict(like, state),
    ):
        assert jax.tree.structure(restored) == jax.tree.structure(frozen)
        jax.tree.map(np.testing.assert_array_equal, restored, frozen)
        dtypes = jax.tree.map(lambda x: x.dtype, restored)
        assert dtypes == jax.tree.map(lambda x: x.dtype, frozen)
    assert same_bits(model.apply(restored, X), model.apply(frozen, X))


def test_flax_restores_no_frozen_variables_from_trained_ones(dense):
    _, variables, frozen = dense
    with pytest.raises(ValueError, match=r"\{'weight'\}.*not present in state dict"):
        serialization.from_bytes(frozen, serialization.to_bytes(variables))


# Has a threshold without training; the codes of W depend on the layer's noise.
STARTED = dataclasses.replace(STOCHASTIC_W, start=2.0)


@pytest.fixture(scope="module")
def dense():
    layer = nn.Dense(80, dot_general=FallbackDot(STARTED))
    variables = layer.init(jax.random.key(1), X)
    return layer, variables, fbq_jax.freeze(layer, variables, X)


def test_untrained_layers_are_refused(dense):
    layer, variables, _ = dense
    untrained = {**variables["fallback"]["dot_general"], "theta": jnp.float32(-1.0)}
    variables = {**variables, "fallback": {"dot_general": untrained}}
    with pytest.raises(ValueError, match=r"no threshold yet .* in: \(root\)\."):
        fbq_jax.freeze(layer, variables, X)


def test_a_frozen_model_does_not_train(dense):
    layer, _, frozen = dense
    with pytest.raises(ValueError, match=r"frozen and does not train.*mutable"):
        layer.apply(frozen, X, mutable=["fallback"])


NEAREST = Recipe(block=32, dlhs=Gemm(), drhs=Gemm())
# The recipe, and the error of dX that requantizing W adds.
GRADIENTS = {
    "blocks": (NEAREST, 0.0),
    "rows": (recipes.rowwise, 0.02),
    "floats": (dataclasses.replace(NEAREST, dlhs=FLOAT_GEMM), 0.02),
}


@pytest.mark.parametrize("name", with_first_fast(GRADIENTS))
def test_gradients_flow_through_frozen_layers(name):
    """Those of the input and the bias; there is none of the codes."""
    recipe, error = GRADIENTS[name]
    layer = nn.Dense(48, dot_general=FallbackDot(recipe))
    variables = as_trained(layer, X)
    frozen = fbq_jax.freeze(layer, variables, X)

    def gradients(variables):
        def loss(bias, x):
            params = {**variables["params"], "bias": bias}
            return jnp.sum(layer.apply({**variables, "params": params}, x) ** 2)

        return jax.jit(jax.grad(loss, (0, 1)))(variables["params"]["bias"], X)

    expected, found = gradients(variables), gradients(frozen)
    np.testing.assert_array_equal(found[0], expected[0])
    scale = float(jnp.max(jnp.abs(expected[1])))
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=error * scale)


def noisy_layer(name, recipe, backward):
    """A layer that rounds the gradients of its products as ``backward`` does."""
    changes = {
        "dlhs": dataclasses.replace(recipe.dlhs, lhs=backward),
        "drhs": dataclasses.replace(recipe.drhs, rhs=backward),
    }
    dot = FallbackDot(dataclasses.replace(recipe, **changes))
    routing = Routing(4, capacity_factor=2.0)
    return {
        "dense": nn.Dense(48, dot_general=dot),
        "norm": NormDense(48, dot_general=dot),
        "gate": GatedMLP(128, dot_general=dot),
        "experts": MoEMLP(routing, 64, dot_general=dot),
        "experts in float": MoEMLP(routing, 64, bits=None, dot_general=dot),
    }[name]


@pytest.mark.parametrize(
    ("name", "recipe"),
    rows_with_first_fast(
        [
            ("dense", recipes.block),
            ("experts", recipes.block),
            ("gate", recipes.block),
            ("experts in float", recipes.block),
            ("gate", recipes.row_block_lhs),
            ("norm", recipes.block),
            ("norm", recipes.row_block_lhs),
        ],
        2,
    ),
)
def test_noise_of_frozen_layers_averages_out(name, recipe):
    """It follows the gradient of the output, because the state does not move."""
    layer = noisy_layer(name, recipe, "stochastic")
    x = jax.random.normal(jax.random.key(4), (2, 24, 128))
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    frozen = fbq_jax.freeze(layer, variables, x)
    shape = jax.eval_shape(layer.apply, variables, x).shape
    dy = jax.random.normal(jax.random.key(3), shape)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(layer, variables, factor):
        """That of dy, whose bits the factor changes."""
        _, vjp = jax.vjp(lambda x: layer.apply(variables, x), x)
        return vjp(factor * dy)[0] / factor

    expected = gradient(noisy_layer(name, recipe, "nearest"), variables, 1.0)
    draws = [gradient(layer, frozen, 1.0 + i / 100) for i in range(40)]
    np.testing.assert_array_equal(gradient(layer, frozen, 1.0), draws[0])
    of_one = oracle.relative(draws[0], expected)
    assert of_one < 0.1
    assert oracle.relative(np.mean(draws, axis=0), expected) < 0.6 * of_one


def shared_dense():
    """A layer that the steps of a scan share: its codes are frozen once."""
    model = Sharing(FallbackDot(dataclasses.replace(RECIPE, start=2.0)))
    variables = model.init(jax.random.key(1), SQUARE)
    return model, variables, fbq_jax.freeze(model, variables, SQUARE)


@pytest.mark.parametrize("kind", ["one layer", "shared"])
def test_mixed_variables_are_refused(kind, dense):
    layer, variables, frozen = dense if kind == "one layer" else shared_dense()
    x = X if kind == "one layer" else SQUARE
    cases = [
        ({"fallback": variables["fallback"]}, "has no codes in the collection 'fallb"),
        ({"params": variables["params"]}, "the codes of a frozen weight and an unq"),
    ]
    if kind == "shared":
        up = {**frozen["params"]["shared"]["up"]}
        del up["dot_general"]
        without_codes = {"params": {"shared": {"up": up}}}
        cases.append((without_codes, "no codes in the collection 'params'"))
    for mixed, message in cases:
        with pytest.raises(ValueError, match=message):
            layer.apply({**frozen, **mixed}, x)
    with pytest.raises(ValueError, match="freeze takes a model once"):
        fbq_jax.freeze(layer, frozen, x)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Dense(80), "this model leaves it unquantized"),
        (nn.Dense(80, dot_general=fallback_dot), "use the recipe that it was trained "),
    ],
)
def test_frozen_variables_of_another_model_are_refused(other, message, dense):
    layer, variables, frozen = dense
    with pytest.raises(ValueError, match=message):
        other.apply(frozen, X)
    with pytest.raises(ValueError, match="found no state of a FallbackDot"):
        fbq_jax.freeze(layer, {"params": variables["params"]}, X)


class Step(nn.Module):
    """A step of a scan, or what maps an example; ``op`` is that of its layer."""

    op: FallbackDot

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(32, dot_general=self.op, name="up")(x), None


def steps(op, step=Step):
    """Three steps that share their parameters, and have a state each."""
    rngs = {"params": False}
    options = {"variable_broadcast": "params", "split_rngs": rngs, "length": 3}
    return nn.scan(step, {"fallback": 0}, **options)(op, name="shared")


SHARING = {
    "steps": steps,
    "steps with remat": lambda op: steps(op, nn.remat(Step)),
    "examples": lambda op: nn.vmap(
        Step,
        variable_axes={"params": None, "fallback": 0},
        split_rngs={"params": False},
        in_axes=(0, None),
    )(op, name="shared"),
    # Along an axis of the kernels.
    "a stack of steps": lambda op: nn.scan(
        Sharing, {"params": 1, "fallback": 0}, split_rngs={"params": True}, length=2
    )(op, name="stack"),
}


class Sharing(nn.Module):
    """A model whose steps or examples share parameters."""

    op: FallbackDot
    make: Callable[..., nn.Module] = steps

    @nn.compact
    def __call__(self, x, _=None):
        return self.make(self.op)(x, None)


@pytest.mark.parametrize("name", with_first_fast(SHARING))
def test_a_kernel_that_is_shared_is_frozen_once(name):
    model = Sharing(FallbackDot(RECIPE), SHARING[name])
    variables = as_trained(model, SQUARE)
    frozen = fbq_jax.freeze(model, variables, SQUARE)
    kernels = 2 if name == "a stack of steps" else 1
    codes = [leaf for leaf in jax.tree.leaves(frozen) if leaf.dtype == jnp.int8]
    assert [array.size for array in codes] == [kernels * 32 * 32]
    apply = jax.jit(lambda variables: model.apply(variables, SQUARE)[0])
    assert same_bits(apply(frozen), apply(variables))
    init = functools.partial(model.init, jax.random.key(0))
    restored = serialization.from_bytes(
        jax.eval_shape(lambda: fbq_jax.freeze(model, init(SQUARE), SQUARE)),
        serialization.to_bytes(frozen),
    )
    jax.tree.map(np.testing.assert_array_equal, restored, frozen)


@pytest.mark.exhaustive
def test_steps_with_other_codes_share_none():
    """Those of stochastic rounding depend on the step's seed."""
    model = Sharing(FallbackDot(STOCHASTIC_W))
    variables = as_trained(model, SQUARE)
    frozen = fbq_jax.freeze(model, variables, SQUARE)
    codes = frozen["fallback"]["shared"]["up"]["dot_general"]["weight"].codes.main.codes
    assert codes.shape == (3, 1, 32, 32)
    assert not jnp.array_equal(codes[0], codes[1])
    apply = jax.jit(lambda variables: model.apply(variables, SQUARE)[0])
    assert same_bits(apply(frozen), apply(variables))


def test_a_jitted_layer_is_traced_again(dense):
    """A cached trace would not tell ``freeze`` how the layer multiplies."""
    _, variables, frozen = dense
    layer = nn.jit(nn.Dense)(80, dot_general=FallbackDot(STARTED))
    layer.apply(variables, X, mutable=["fallback"])
    again = fbq_jax.freeze(layer, variables, X)
    jax.tree.map(np.testing.assert_array_equal, again, frozen)


class Experts(nn.Module):
    """Two products may read one kernel, but its codes fit only one of them."""

    ways: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        op = FallbackEinsum(FallbackDot(RECIPE))
        layer = Einsum((2, 80, 80), einsum_op=op, dtype=jnp.bfloat16)
        return sum(layer(x, way) for way in self.ways)


def test_frozen_einsums_compute_the_product_they_trained_with():
    there, back = "ebd,edf->bef", "ebd,efd->bef"
    model, x = Experts((there,)), 0.5 * X  # one block exceeds theta
    variables = as_trained(model, x)
    frozen = fbq_jax.freeze(model, variables, x)
    training = jax.jit(lambda v: model.apply(v, x, mutable=["fallback"]))
    y, state = training(variables)
    assert 0.0 < state["fallback"]["Einsum_0"]["dot_general"]["rate"] < 1.0
    assert same_bits(jax.jit(model.apply)(frozen, x), y)
    with pytest.raises(ValueError, match=r"over the axes \(1,\).*another, over \(2,\)"):
        Experts((back,)).apply(frozen, X)
    with pytest.raises(ValueError, match="layer 'Einsum_0' has codes for one product"):
        fbq_jax.freeze(Experts((there, back)), variables, X)


class Custom(nn.Module):
    """A layer that does not come from Flax."""

    name_of_weight: str = "kernel"
    regularized: bool = False

    @nn.compact
    def __call__(self, x):
        w = self.param(self.name_of_weight, nn.initializers.lecun_normal(), (80, 80))
        penalty = jnp.sum(w**2) if self.regularized else 0.0
        return FallbackDot(STARTED)(x, w, (((2,), (0,)), ((), ()))) + penalty

    @nn.compact
    def without(self, x):
        return x


class Normed(nn.Module):
    """Another module than the layer reads its kernel."""

    def setup(self):
        self.dense = nn.Dense(16, use_bias=False, dot_general=BLOCK)

    def __call__(self, x):
        y = self.dense(x)
        return y / jnp.linalg.norm(self.dense.variables["params"]["kernel"])


class Printing(nn.Module):
    """Calls a function that keeps its order, which ``jax.vmap`` does not take."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(80, dot_general=BLOCK)(x)
        io_callback(print, None, y.sum(), ordered=True)
        return y


def test_layers_that_are_not_flaxs():
    model = Custom()
    variables = model.init(jax.random.key(1), X)
    frozen = fbq_jax.freeze(model, variables, X)
    assert same_bits(model.apply(frozen, X), model.apply(variables, X))


FLOAT_FORWARD = FallbackDot(dataclasses.replace(recipes.rowwise, fwd=FLOAT_GEMM))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Custom(), {"method": "without"}, r"does not run \(root\);"),
        (Custom("weight"), {}, "whose weight is their parameter 'kernel'"),
        (Custom(regularized=True), {}, "'kernel', which the model reads other"),
        (Normed(), {}, r"would remove 'dense/kernel', .* reads"),
        # Codes of one input's weight would be wrong for every other one.
        (
            SmoothSwiGLU(32, dot_general=BLOCK),
            {},
            "weights of down once: they depend on",
        ),
        (Printing(), {}, "vmap does not take a function that it calls"),
        (nn.Dense(80, dot_general=FLOAT_FORWARD), {}, r"'\(root\)' has no codes to fr"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_cannot_be_frozen_is_named(model, options, message):
    variables = jax.eval_shape(model.init, jax.random.key(1), X)
    variables = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), variables)
    for x in X, jax.ShapeDtypeStruct(X.shape, X.dtype):
        with pytest.raises(ValueError, match=message):
            fbq_jax.freeze(model, variables, x, **options)


@pytest.mark.parametrize("options", [{}, {"mutable": ["cache"]}])
def test_attention_with_a_cache_is_frozen(options):
    op = FallbackDot(RECIPE)
    layer = nn.MultiHeadDotProductAttention(
        4, decode=True, qkv_dot_general=op, out_dot_general=op
    )
    x = X[:, :5]
    variables = as_trained(layer, x)
    variables["cache"] = jax.jit(layer.init)(jax.random.key(0), x)["cache"]
    frozen = fbq_jax.freeze(layer, variables, x[:, :1], **options)
    apply = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
    for i in range(5):
        token = x[:, i : i + 1]
        y, cache = apply(variables, token)
        z, frozen_cache = apply(frozen, token)
        np.testing.assert_array_equal(y, z)
        variables, frozen = {**variables, **cache}, {**frozen, **frozen_cache}


def test_frozen_layers_run_where_nans_are_errors():
    model = nn.Dense(16, dot_general=BLOCK)
    variables = model.init(jax.random.key(1), X)
    frozen = fbq_jax.freeze(model, variables, X)
    with jax.debug_nans(True):
        assert same_bits(model.apply(frozen, X), model.apply(variables, X))


class Repeated(nn.Module):
    """A layer that runs twice."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(80, dot_general=BLOCK)
        return layer(layer(x))


def test_a_nan_is_no_second_weight_and_tracers_do_not_outlive_the_call():
    variables = Repeated().init(jax.random.key(0), X)
    kernel = variables["params"]["Dense_0"]["kernel"]
    variables["params"]["Dense_0"]["kernel"] = kernel.at[0, 0].set(jnp.inf)
    variables["empty"] = {}
    jax.clear_caches()  # The check searches everything that is kept.
    with jax.checking_leaks():
        frozen = fbq_jax.freeze(Repeated(), variables, X)
    want = Repeated().apply(variables, X)
    np.testing.assert_array_equal(Repeated().apply(frozen, X), want)
