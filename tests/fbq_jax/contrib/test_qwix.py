"""Models that multiply by their parameters in their own code."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import fbq_jax
from fbq_jax import (
    FallbackConv,
    FallbackEinsum,
    Recipe,
    RulesDot,
    fallback_stats,
    recipes,
)
from fbq_jax.contrib import qwix
from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.nnx import dot as nnx_dot
from fbq_jax.recipes.rules_report import NOT_REACHED, WITHOUT_OP
from tests.fbq_jax.linen.test_whole_models import KEY, X, train
from tests.fbq_jax.nnx.test_whole_models import descend
from tests.marks import with_first_fast

SMALL = Recipe(block=32)
RULES = {"head": None, ".*": SMALL}
HAND = RulesDot(RULES)


def product(dot, x, w):
    """``x @ w`` by an op that is injected by hand."""
    return dot(x, w, (((x.ndim - 1,), (0,)), ((), ())))


# One product each, of x [..., 32] and w [32, 32]; each also by hand.
PRODUCTS = {
    "@": lambda x, w: x @ w,
    "dot": lambda x, w: jnp.dot(x, w),
    "tensordot": lambda x, w: jnp.tensordot(x, w, 1),
    "einsum": lambda x, w: jnp.einsum("btd,df->btf", x, w),
    "dot_general": lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))),
    "cast": lambda x, w: x @ w.astype(jnp.float16).astype(x.dtype),
    "jitted": jax.jit(lambda x, w: (x @ w).astype(x.dtype)),
    "view": lambda x, w: x @ w.reshape(2, 16, 32).reshape(32, 32),
    "left": lambda x, w: jnp.einsum("df,btd->btf", w, x),
}


class Layer(nn.Module):
    multiply: object = PRODUCTS["@"]
    op: object = None

    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", nn.initializers.lecun_normal(), (32, 32))
        if self.op is None:
            y = self.multiply(x, w)
        else:
            w = w.astype(jnp.float16).astype(x.dtype) if self.multiply is CAST else w
            y = product(self.op, x, w)
        scores = jnp.einsum("btd,bsd->bts", y, y)  # activations only
        return x + jnp.einsum("bts,bsd->btd", nn.softmax(scores), y), None


CAST = PRODUCTS["cast"]


class Unrolled(nn.Module):
    """Layers with equal shapes, whose products JAX traces once."""

    multiply: object = PRODUCTS["@"]
    op: object = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = Layer(self.multiply, self.op)(x)
        return Layer(self.multiply, self.op, name="head")(x)[0]


class Scanned(nn.Module):
    multiply: object = PRODUCTS["@"]
    op: object = None

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0} | ({"fallback": 0} if self.op else {})
        layers = nn.scan(nn.remat(Layer), axes, split_rngs={"params": True}, length=2)
        return layers(self.multiply, self.op, name="layers")(x, None)[0]


@pytest.mark.parametrize("name", with_first_fast(PRODUCTS))
def test_every_product_has_the_bits_of_injection_by_hand(name):
    multiply = PRODUCTS[name]
    model, report = qwix.quantize(Unrolled(multiply), RULES, KEY, X)
    variables = train(model)
    by_hand = train(Unrolled(multiply, HAND))
    jax.tree.map(np.testing.assert_array_equal, variables, by_hand)
    stats = fallback_stats(variables)
    assert {path: int(s.count) for path, s in stats.items()} == {
        "Layer_0": 2,
        "Layer_1": 2,
    }
    assert [p.parameter for p in report.products] == ["Layer_0/w", "Layer_1/w"]
    assert [p[::2] for p in report.float_parameters] == [("head/w", "rule 'head'")]


@pytest.mark.exhaustive
def test_scanned_and_rematerialized_layers():
    rules = {".*": RULES[".*"]}
    model, report = qwix.quantize(Scanned(), rules, KEY, X)
    variables = train(model)
    by_hand = train(Scanned(op=HAND))
    jax.tree.map(np.testing.assert_array_equal, variables, by_hand)
    assert fallback_stats(variables)["layers"].count.tolist() == [2, 2]
    assert [p.shape for p in report.products] == [(32, 32)]


@pytest.mark.exhaustive
def test_outside_jit_nothing_is_missed():
    """Neither in ``init`` nor in a gradient, however often the shapes have run."""
    floats = Unrolled()
    params = floats.init(KEY, X)
    before = floats.apply(params, X)
    model, _ = qwix.quantize(floats, RULES, KEY, X)
    variables = model.init(KEY, X)
    assert list(fallback_stats(variables)) == ["Layer_0", "Layer_1"]
    for _ in range(2):
        y, state = model.apply(variables, X, mutable=["fallback"])
        assert [int(s.count) for s in fallback_stats(state).values()] == [1, 1]
        np.testing.assert_array_equal(floats.apply(params, X), before)
    expected = jax.jit(functools.partial(model.apply, mutable=["fallback"]))
    np.testing.assert_allclose(y, expected(variables, X)[0], rtol=1e-5, atol=1e-5)
    grads = jax.grad(
        lambda v: jnp.sum(model.apply(v, X, mutable=["fallback"])[0]), allow_int=True
    )(variables)
    assert float(jnp.abs(grads["params"]["Layer_0"]["w"]).max()) > 0


@pytest.mark.exhaustive
def test_convolutions_and_einsums_of_several_axes():
    class Net(nn.Module):
        op: object = None

        @nn.compact
        def __call__(self, x):
            conv = lax.conv_general_dilated
            einsum = jnp.einsum
            if self.op is not None:
                conv, einsum = FallbackConv(self.op), FallbackEinsum(self.op)
            ones = nn.initializers.normal()
            w = self.param("conv", ones, (2, 32, 32))
            x = conv(x, w, (2,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))
            x = einsum("btd,dhk->bthk", x, self.param("up", ones, (32, 2, 16)))
            return einsum("bthk,hkd->btd", x, self.param("down", ones, (2, 16, 32)))

    model, report = qwix.quantize(Net(), {".*": SMALL}, KEY, X)
    by_hand = train(Net(RulesDot({".*": SMALL})))
    jax.tree.map(np.testing.assert_array_equal, train(model), by_hand)
    assert len(report.products) == 3


@pytest.mark.exhaustive
def test_layers_that_take_an_op_and_others_in_one_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(16, 32, name="embed")
            x = nn.Dense(32, name="dense")(embed(tokens))
            return embed.attend(x)

    tokens = jnp.arange(32).reshape(4, 8) % 16
    model, report = qwix.quantize(Model(), {".*": recipes.block}, KEY, tokens)
    variables = model.init(KEY, tokens)
    assert set(fallback_stats(variables)) == {"dense", "embed"}
    assert {p.parameter for p in report.products} == {
        "dense/kernel",
        "embed/embedding",
    }
    frozen = fbq_jax.freeze(model, variables, tokens)
    serve = jax.jit(model.apply)
    np.testing.assert_array_equal(serve(frozen, tokens), serve(variables, tokens))
    kept = frozen["params"]["embed"]["embedding"]  # a gather reads it, too
    assert kept is variables["params"]["embed"]["embedding"]
    with pytest.raises(ValueError, match="has no codes in the collection"):
        serve({**frozen, "fallback": variables["fallback"]}, tokens)


class Gated(nn.Module):
    """A block whose einsums share its scope, with two matrices in one parameter."""

    @nn.compact
    def __call__(self, x, _=None):
        gating, down = NamedEinsum("gating_einsum", (2, 48, 32)), NamedEinsum("w")
        nn.share_scope(self, gating)
        nn.share_scope(self, down)
        gate = gating("...d,nfd->...nf", x)
        return x + down(
            "...f,fd->...d", nn.gelu(gate[..., 0, :]) * gate[..., 1, :]
        ), None


class NamedEinsum(nn.Module):
    weight_name: str
    shape: tuple[int, ...] = (48, 32)

    def setup(self):
        self.w = self.param(self.weight_name, nn.initializers.normal(0.1), self.shape)

    def __call__(self, equation, x):
        w = self.w.astype(jnp.bfloat16).astype(x.dtype)
        return jnp.einsum(equation, x, w)


class GatedStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, _ = Gated(name="first")(x)
        scan = nn.scan(
            nn.remat(Gated), {"params": 0}, split_rngs={"params": True}, length=2
        )
        return scan(name="layers")(x, None)[0]


@pytest.mark.exhaustive
def test_frozen_linen_modules_that_multiply_in_their_own_code():
    started = Recipe(block=32, start=2.0)
    model, _ = qwix.quantize(GatedStack(), {".*": started}, KEY, X)
    variables = jax.jit(model.init)(KEY, X)
    frozen = fbq_jax.freeze(model, variables, X)
    assert jax.tree.leaves(frozen["params"]) == []
    codes = frozen["fallback"]["layers"]["dot_general"]["weight"].codes
    assert codes.mT.shape == (2, 1, 32, 96)
    serve = jax.jit(model.apply)
    np.testing.assert_array_equal(serve(frozen, X), serve(variables, X))
    with pytest.raises(
        ValueError, match="both the codes of a frozen weight and an unq"
    ):
        serve({**frozen, "params": variables["params"]}, X)
    with pytest.raises(ValueError, match="has no codes in the collection 'fallback'"):
        serve({**frozen, "fallback": variables["fallback"]}, X)
    with pytest.raises(
        (AttributeError, ValueError), match=r"FrozenParameter|is frozen"
    ):
        GatedStack().apply(frozen, X)


def test_state_does_not_leave_transformations_that_are_not_flaxs():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.lecun_normal(), (32, 32))
            x = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w)
            return lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0]

    with pytest.warns(UserWarning, match="quantize nothing.* layers here are none"):
        model, report = qwix.quantize(Model(), {".*": SMALL}, KEY, X)
    assert sorted(jax.eval_shape(model.init, KEY, X)) == ["params"]
    assert [p[::2] for p in report.float_parameters] == [("w", NOT_REACHED)]
    assert report.products == ()


class Raw(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 6)

    def __call__(self, x):
        return x + jnp.einsum("btd,df->btf", x, self.w[...])


class Scaled(Raw):
    """With a vector that may look like a matrix."""

    def __init__(self, rngs, shape=(1, 1, 32)):
        super().__init__(rngs)
        self.scale = nnx.Param(jnp.ones(shape))

    def __call__(self, x):
        return super().__call__(x * self.scale[...].reshape(1, 1, 32))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.blocks = nnx.List([Scaled(rngs) for _ in range(2)])
        self.dense = nnx.Linear(32, 32, rngs=rngs)
        self.head = Scaled(rngs)

    def encode(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x

    def __call__(self, tokens):
        return self.embed.attend(self.head(self.dense(self.encode(tokens))))


@pytest.mark.exhaustive
def test_nnx_modules_that_multiply_in_their_own_code():
    tokens = jnp.arange(32).reshape(4, 8) % 16
    model = NnxModel(nnx.Rngs(0))
    model, report = qwix.quantize_nnx(model, RULES, tokens, rngs=nnx.Rngs(1))
    assert isinstance(model, NnxModel)
    assert {p.parameter: p.rule for p in report.products} == {
        "blocks/0/w": ".*",
        "blocks/1/w": ".*",
        "dense/kernel": ".*",
        "embed/embedding": ".*",
    }
    floats = {p.parameter: p.reason for p in report.float_parameters}
    assert floats.pop("head/w") == "rule 'head'"
    assert set(floats) == {"blocks/0/scale", "blocks/1/scale", "head/scale"}
    assert report.unused_rules == report.unmatched_layers == ()
    descend(model, tokens)
    counts = {k: int(s.count) for k, s in fbq_jax.nnx.fallback_stats(model).items()}
    assert counts == {
        "blocks/0/w_dot_general": 2,
        "blocks/1/w_dot_general": 2,
        "dense": 2,
        "embed/embedding_dot_general": 2,
    }
    model.encode(tokens)  # outside jit, by another method
    stats = fbq_jax.nnx.fallback_stats(model)
    assert int(stats["blocks/1/w_dot_general"].count) == 3
    assert int(stats["dense"].count) == 2


class Transposed(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2, 16, 32)) / 6)

    def __call__(self, x):
        return x @ self.w[...].reshape(32, 32).T.astype(jnp.bfloat16).astype(x.dtype)


@pytest.mark.exhaustive
def test_frozen_nnx_modules_that_multiply_in_their_own_code():
    tokens = jnp.arange(32).reshape(4, 8) % 16
    model = NnxModel(nnx.Rngs(0))
    model.dense = Transposed(nnx.Rngs(2))
    started = Recipe(block=32, start=2.0)
    model, _ = qwix.quantize_nnx(
        model, {"head": None, ".*": started}, tokens, rngs=nnx.Rngs(1)
    )
    frozen = fbq_jax.nnx.freeze(model, tokens)
    codes = nnx.to_flat_state(nnx.state(frozen, nnx_dot.FrozenCodes))
    assert ["/".join(map(str, path)) for path, _ in codes] == [
        "blocks/0/w_dot_general/weight",
        "blocks/1/w_dot_general/weight",
        "dense/w_dot_general/weight",
        "embed/embedding_dot_general/weight",
    ]
    params = nnx.to_flat_state(nnx.state(frozen, nnx.Param))
    kept = {"/".join(map(str, p)) for p, v in params if jax.tree.leaves(v)}
    assert kept == {
        "blocks/0/scale",
        "blocks/1/scale",
        "embed/embedding",  # a gather reads it, too
        "head/scale",
        "head/w",
    }
    model.eval()
    serve = nnx.jit(lambda model: model(tokens))
    np.testing.assert_array_equal(serve(frozen), serve(model))


class Stacked(nnx.Module):
    """Layers of their own code in a stack, with a vector in each."""

    def __init__(self, rngs, layers=2):
        make = functools.partial(Scaled, shape=32)
        self.layers = nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)
        self.head = make(rngs)

    def __call__(self, x):
        scan = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.head(scan(x, self.layers))


@pytest.mark.exhaustive
def test_a_stack_of_nnx_modules_that_multiply_in_their_own_code():
    model = Stacked(nnx.Rngs(0))
    before = model(X)
    started = Recipe(block=32, start=2.0)
    model, report = qwix.quantize_nnx(model, {".*": started}, X, rngs=nnx.Rngs(1))
    assert {p.parameter: p.shape for p in report.products} == {
        "head/w": (32, 32),
        "layers/w": (32, 32),
    }
    assert report.float_parameters == ()
    np.testing.assert_allclose(nnx.jit(lambda model: model(X))(model), before, atol=0.2)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: s.count.tolist() for path, s in stats.items()} == {
        "head/w_dot_general": 1,
        "layers/w_dot_general": [1, 1],
    }
    seeds = model.layers.w_dot_general.seed[...]
    assert seeds[0] != seeds[1]
    frozen = fbq_jax.nnx.freeze(model, X)
    assert frozen.layers.w_dot_general.weight.get_value().mT.shape == (2, 1, 32, 32)
    model.eval()
    serve = nnx.jit(lambda model: model(X))
    np.testing.assert_array_equal(serve(frozen), serve(model))


def test_nnx_products_inside_transformations_of_jax_stay_in_float():
    class Mapped(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(32, 32, rngs=rngs)
            self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 6)

        def __call__(self, x):
            return jax.vmap(lambda x: x @ self.w[...])(self.up(x))

    model = Mapped(nnx.Rngs(0))
    model, report = qwix.quantize_nnx(model, {".*": SMALL}, X, rngs=nnx.Rngs(1))
    assert [p.parameter for p in report.products] == ["up/kernel"]
    assert [p[::2] for p in report.float_parameters] == [("w", NOT_REACHED)]
    nnx.jit(lambda model: model(X))(model)
    assert list(fbq_jax.nnx.fallback_stats(model)) == ["up"]


def test_linen_modules_in_nnx_models_stay_in_float():
    class Bridged(nnx.Module):
        def __init__(self):
            self.outer = Raw(nnx.Rngs(0))
            self.inner = nnx.bridge.ToNNX(nn.Dense(32), rngs=nnx.Rngs(0))
            self.inner.lazy_init(X)

        def __call__(self, x):
            return self.outer(self.inner(x))

    model = Bridged()
    model, report = qwix.quantize_nnx(model, {".*": SMALL}, X, rngs=nnx.Rngs(1))
    assert [p.parameter for p in report.products] == ["outer/w"]
    reasons = {parameter: why for parameter, _, why in report.float_parameters}
    assert reasons["inner/kernel"] == WITHOUT_OP
    assert np.all(np.isfinite(model(X)))


class Named(Raw):
    """Its copies are made by a function of its own."""

    def __reduce__(self):
        return Named, (nnx.Rngs(0),)


@pytest.mark.parametrize("cls", [Raw, Named])
def test_a_model_can_be_pickled(cls):
    model, _ = qwix.quantize_nnx(cls(nnx.Rngs(0)), {".*": SMALL}, X, rngs=nnx.Rngs(1))
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is (type(model) if cls is Raw else Named)
    in_float = cls(nnx.Rngs(0))(X)
    assert np.array_equal(copy(X), in_float) == (cls is Named)
    np.testing.assert_array_equal(copy(X), model(X) if cls is Raw else in_float)


def test_the_given_model_stays_as_it_is():
    """The quantized one shares its parameters."""
    model = NnxModel(nnx.Rngs(0))
    before, tokens = nnx.graphdef(model), jnp.arange(32).reshape(4, 8) % 16
    quantized, _ = qwix.quantize_nnx(model, RULES, tokens)
    with pytest.raises(TypeError, match="unknown"):
        qwix.quantize_nnx(model, RULES, tokens, unknown=1)
    assert nnx.graphdef(model) == before
    assert quantized.blocks[0].w is model.blocks[0].w


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", [nnx.remat, jax.checkpoint, nnx.jit])
def test_a_frozen_model_in_the_closure_of_a_transformation(remat):
    """Its parameters are shown as arrays inside the transformation, then hidden."""
    inner = Stacked(nnx.Rngs(0)).head
    started = Recipe(block=32, start=2.0)
    inner, _ = qwix.quantize_nnx(inner, {".*": started}, X, rngs=nnx.Rngs(1))
    frozen = fbq_jax.nnx.freeze(inner, X)
    inner.eval()

    def loss(model):
        return lambda x: jnp.mean(remat(lambda x: model(x))(x) ** 2)

    for run in (loss, lambda model: jax.jit(loss(model))):
        assert float(run(frozen)(X)) == float(run(inner)(X))
    grads = jax.jit(jax.grad(loss(frozen)))(X)
    np.testing.assert_allclose(grads, jax.grad(loss(inner))(X), atol=1e-3)
    assert isinstance(frozen.w.get_raw_value(), FrozenKernel)


def test_linen_states_that_do_not_tell_parameters_apart_are_not_frozen():
    class Methods(nn.Module):
        def setup(self):
            self.a, self.b = Matrix(), Matrix()

        def by(self, x, name):
            return x @ getattr(self, name).w

    class Matrix(nn.Module):
        def setup(self):
            self.w = self.param("w", nn.initializers.normal(), (32, 32))

        def parts(self, x):
            return x @ self.w.reshape(32, 32).T + x @ self.w

    started = {".*": Recipe(block=32, start=2.0)}
    model, _ = qwix.quantize(Methods(), started, KEY, X, "a", method="by")
    variables = jax.jit(lambda: model.init(KEY, X, "a", method="by"))()
    params = {**variables["params"], "b": variables["params"]["a"]}
    variables = {**variables, "params": params}
    frozen = fbq_jax.freeze(model, variables, X, "a", method="by")
    with pytest.raises(ValueError, match="has both the codes of a frozen weight"):
        jax.eval_shape(lambda: model.apply(frozen, X, "b", method="by"))
    frozen["params"]["b"] = frozen["params"]["a"]
    with pytest.raises(ValueError, match="has the codes of 'a/w', but multiplies by"):
        jax.eval_shape(lambda: model.apply(frozen, X, "b", method="by"))
    model, _ = qwix.quantize(Matrix(), started, KEY, X, method="parts")
    variables = jax.jit(lambda: model.init(KEY, X, method="parts"))()
    frozen = fbq_jax.freeze(model, variables, X, method="parts")
    serve = jax.jit(functools.partial(model.apply, method="parts"))
    np.testing.assert_array_equal(serve(frozen, X), serve(variables, X))


def test_parts_of_a_parameter_are_not_frozen():
    class Gates(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(KEY, (2, 32, 32)))

        def __call__(self, x):
            return (x @ self.w[0]) * (x @ self.w[1])

    model = Gates()
    model, _ = qwix.quantize_nnx(model, {".*": recipes.block}, X, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="layer 'w' multiplies by several weights"):
        fbq_jax.nnx.freeze(model, X)


def test_a_precision_is_ignored_on_request():
    class Precise(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((32, 32)))
            self.dense = nnx.Linear(32, 8, precision="high", rngs=nnx.Rngs(0))

        def __call__(self, x):
            x = jnp.einsum("btd,df->btf", x, self.w, precision=lax.Precision.HIGHEST)
            return self.dense(x)

    with pytest.raises(ValueError, match=r"layer .*: precision=high.*RulesDot"):
        qwix.quantize_nnx(Precise(), {".*": recipes.block}, X)
    _, report = qwix.quantize_nnx(
        Precise(), {".*": recipes.block}, X, ignore_precision=True
    )
    assert {p.parameter: p.ignores_precision for p in report.products} == {
        "dense/kernel": True,
        "w": True,
    }


@pytest.mark.parametrize("both_multiply", [False, True])
def test_owners_of_a_shared_nnx_parameter_have_their_own_ops(both_multiply):
    class Owner(nnx.Module):
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return x @ self.w[...]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = Owner(nnx.Param(rngs.params.normal((32, 32))))
            self.second = Owner(self.first.w)

        def __call__(self, x):
            x = self.first(x) if both_multiply else x * self.first.w[...].sum()
            return self.second(x)

    model, report = qwix.quantize_nnx(
        Model(nnx.Rngs(0)), {".*": SMALL}, X, rngs=nnx.Rngs(1)
    )
    layers = ["first", "second"] if both_multiply else ["second"]
    assert [product.layer for product in report.products] == layers
    stats = fbq_jax.nnx.fallback_stats(model)
    assert [path.split("/")[0] for path in stats] == layers
