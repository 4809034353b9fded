"""Whole NNX models, quantized without a change of their code."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fbq_jax
from fbq_jax import Recipe, recipes
from fbq_jax.contrib import qwix
from fbq_jax.nnx import FallbackDot, quantize
from fbq_jax.recipes.rules_report import NOT_REACHED, WITHOUT_OP

SMALL = Recipe(block=32)
X = jax.random.normal(jax.random.key(0), (4, 8, 32))
TOKENS = jax.ShapeDtypeStruct((4, 8), jnp.int32)


class Own(nnx.Module):
    """A layer that is not Flax's and takes a ``dot_general``."""

    def __init__(self, rngs, dot_general=lax.dot_general):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)))
        self.dot_general = dot_general

    def __call__(self, x):
        return self.dot_general(x, self.w[...], (((x.ndim - 1,), (0,)), ((), ())))


class Raw(nnx.Module):
    """A layer that multiplies in its own code."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 2, 16)))

    def __call__(self, x):
        y = jnp.einsum("btd,dhk->bthk", x, self.w[...].astype(x.dtype))
        return y.reshape(x.shape)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.layers = nnx.List([Own(rngs), Raw(rngs), nnx.Linear(32, 32, rngs=rngs)])
        self.head = nnx.Linear(32, 8, rngs=rngs)

    @nnx.remat
    def encode(self, x):
        for layer in self.layers:
            x = layer(nnx.silu(x))
        return x

    def __call__(self, tokens, train=False):
        x = self.encode(self.embed(tokens))
        return self.head(x) if train else x


@pytest.mark.parametrize("args", [(TOKENS,), ()], ids=["traced", "by kind"])
def test_a_report_is_complete(args):
    model = Model(nnx.Rngs(0))
    rules = {"head": None, "layers/.*": SMALL, "up": None}
    options = {"train": True} if args else {}
    with pytest.warns(UserWarning, match="'up' keep no layer in float"):
        report = quantize(model, rules, *args, **options, quantize_rngs=nnx.Rngs(1))
    assert [(p.parameter, p.layer, p.rule) for p in report.products] == [
        ("layers/0/w", "layers/0", "layers/.*"),
        ("layers/2/kernel", "layers/2", "layers/.*"),
    ]
    assert {p.parameter: p.reason for p in report.float_parameters} == {
        "embed/embedding": WITHOUT_OP,
        "layers/1/w": WITHOUT_OP,
        "head/kernel": "rule 'head'",
    }
    assert report.unused_rules == ("up",)
    counts = [int(s.count) for s in fbq_jax.nnx.fallback_stats(model).values()]
    assert counts == [0, 0]  # nothing ran


def test_rules_that_quantize_nothing_warn():
    message = "'linear' quantize nothing.* layers here are 'head', 'layers/0', 'lay"
    for args in ((), (TOKENS,)):
        with pytest.warns(UserWarning, match=message) as caught:
            quantize(Model(nnx.Rngs(0)), {"linear": SMALL}, *args)
        assert caught[0].filename == __file__


def test_a_kernel_of_one_axis_is_reported_without_a_trace_and_without_jit():
    init = nnx.initializers.ones
    layer = nnx.Einsum("td,d->t", (64,), rngs=nnx.Rngs(0), kernel_init=init)
    for args in (), (jnp.ones((2, 64)),):
        with jax.disable_jit():
            report = quantize(layer, {".*": SMALL}, *args, quantize_rngs=nnx.Rngs(1))
        assert [p.parameter for p in report.products] == ["kernel"]


def test_a_block_with_an_int8_data_flow_takes_no_rule():
    mlp = fbq_jax.nnx.Int8MLP(64, 64, rngs=nnx.Rngs(0))
    model = nnx.Sequential(mlp, nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    op, x = mlp.dot_general, jnp.ones((32, 64))
    for args in (), (x,):
        report = quantize(model, {".*": SMALL}, *args, quantize_rngs=nnx.Rngs(1))
        assert report.layers == {"layers/1": ".*"}
        assert not report.float_parameters
        assert mlp.dot_general is op
    model(x)


def test_a_convolution_with_a_mask_is_a_whole_model():
    mask = jnp.ones((3, 3, 8, 16))
    conv = nnx.Conv(8, 16, (3, 3), mask=mask, rngs=nnx.Rngs(0))
    report = quantize(
        conv, {".*": SMALL}, jnp.ones((2, 8, 8, 8)), quantize_rngs=nnx.Rngs(1)
    )
    assert [p.parameter for p in report.products] == ["kernel"]
    assert isinstance(conv.conv_general_dilated, fbq_jax.nnx.FallbackConv)


@pytest.mark.parametrize("state", [jax.random.key(0), nnx.Rngs(0)], ids=["key", "rngs"])
def test_random_state_as_for_linen(state):
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="takes no key, and its seeds by keyword"):
        quantize(layer, {".*": SMALL}, state)


def descend(model, *args, **kwargs):
    """Changes a model by two steps of gradient descent."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state):
        model = nnx.merge(graphdef, state)
        grads = nnx.grad(lambda model: jnp.mean(model(*args, **kwargs) ** 2))(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return nnx.state(model)

    nnx.update(model, step(step(state)))


def train(model):
    descend(model, jnp.arange(32).reshape(4, 8) % 16, train=True)
    return nnx.to_pure_dict(nnx.state(model))


def test_same_bits_as_injection_by_hand():
    model, by_hand = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    quantize(model, {"layers/.*": SMALL}, TOKENS, quantize_rngs=nnx.Rngs(1))
    rngs = nnx.Rngs(1)
    by_hand.layers[0].dot_general = nnx.data(FallbackDot(SMALL, rngs=rngs))
    by_hand.layers[2].dot_general = nnx.data(FallbackDot(SMALL, rngs=rngs))
    states = train(model), train(by_hand)
    jax.tree.map(np.testing.assert_array_equal, *states)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: int(s.count) for path, s in stats.items()} == {
        "layers/0": 2,
        "layers/2": 2,
    }


class Depthwise(nnx.Module):
    """As Mamba's convolution: a layer that takes an op, whose kernel code reads."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(32, 32, (3,), feature_group_count=32, rngs=rngs)
        self.tied = nnx.Linear(32, 32, rngs=rngs)
        self.up = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x, both=False):
        x = self.up(x * self.conv.kernel[...][:1]) @ self.tied.kernel[...].T
        return self.conv(self.tied(x)) if both else x


def test_layers_whose_weight_is_read_without_their_op_get_none():
    model = Depthwise(nnx.Rngs(0))
    report = quantize(model, {".*": SMALL}, X, quantize_rngs=nnx.Rngs(1))
    assert [p.parameter for p in report.products] == ["up/kernel"]
    assert [p[::2] for p in report.float_parameters] == [
        ("conv/kernel", NOT_REACHED),
        ("tied/kernel", NOT_REACHED),
    ]
    model(X)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: int(s.count) for path, s in stats.items()} == {"up": 1}
    frozen = fbq_jax.nnx.freeze(model, X)
    model.eval()
    np.testing.assert_array_equal(frozen(X), model(X))
    # A call that uses the ops gives them back.
    report = quantize(model, {".*": SMALL}, X, both=True, quantize_rngs=nnx.Rngs(1))
    assert len(report.products) == 3
    assert sorted(fbq_jax.nnx.fallback_stats(model)) == ["conv", "tied", "up"]


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_layers_whose_weight_a_wrapper_normalizes_keep_their_op(wrapper):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(wrapper(nnx.Linear(32, 32, rngs=rngs), rngs=rngs))
    report = quantize(model, {".*": SMALL}, X, quantize_rngs=rngs)
    (product,) = report.products
    assert product.parameter == "layers/0/layer_instance/kernel"
    assert product.rule == ".*"
    model(X)
    (stats,) = fbq_jax.nnx.fallback_stats(model).values()
    assert stats.count == 1


def test_an_error_leaves_the_model_unchanged():
    model = nnx.Sequential(*(nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(2)))
    ops = [layer.dot_general for layer in model.layers]
    for rules in ({".*": recipes.block}, {"layers/0": recipes.block, ".*": None}):
        with pytest.raises(TypeError, match="dot_general requires"):
            quantize(model, rules, jax.ShapeDtypeStruct((2, 9), jnp.float32))
        assert [layer.dot_general for layer in model.layers] == ops
    quantize(model, {".*": recipes.block}, X)
    assert all(isinstance(layer.dot_general, FallbackDot) for layer in model.layers)


@pytest.mark.parametrize("recipe", [None, recipes.block])
def test_a_frozen_model_keeps_its_codes(recipe):
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    quantize(model, {".*": recipes.block}, X)
    model(X)
    frozen = fbq_jax.nnx.freeze(model, X)
    expected = frozen(X)
    with pytest.raises(ValueError, match=r"'\(root\)' is frozen.* lose its codes"):
        quantize(frozen, {".*": recipe}, X)
    np.testing.assert_array_equal(frozen(X), expected)


class TakesRngs(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs):
        return self.drop(self.up(x), rngs=rngs)


class TakesNone(TakesRngs):
    def __call__(self, x):
        return self.up(x)


@pytest.mark.parametrize("function", [quantize, qwix.quantize_nnx])
def test_rngs_are_those_of_the_models_call(function):
    rules, dropout = {".*": SMALL}, nnx.Rngs(dropout=0)

    def has_rngs(model, *args, **kwargs):
        found = function(model, rules, *args, **kwargs)
        model = found[0] if isinstance(found, tuple) else model
        return model.up.dot_general.has_rngs

    assert not has_rngs(TakesRngs(), X, rngs=dropout)
    assert has_rngs(TakesRngs(), X, rngs=dropout, quantize_rngs=nnx.Rngs(1))
    assert has_rngs(TakesNone(), X, quantize_rngs=nnx.Rngs(1))
    with pytest.warns(DeprecationWarning, match="quantize_rngs= now") as caught:
        assert has_rngs(TakesNone(), X, rngs=nnx.Rngs(1))
    assert caught[0].filename == __file__
    if function is quantize:
        with pytest.warns(DeprecationWarning, match="quantize_rngs= now"):
            assert has_rngs(TakesRngs(), rngs=nnx.Rngs(1))  # nothing is called


class Head(nnx.Module):
    """Multiplies by what it is given, or by a parameter that it shares."""

    def __init__(self, w=None):
        self.w, self.dot_general = w, lax.dot_general

    def __call__(self, x, w):
        w = w if self.w is None else self.w[...]
        return self.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


class Tied(nnx.Module):
    def __init__(self, shares):
        self.embed = nnx.Embed(64, 32, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.head = Head(self.embed.embedding if shares else None)

    def __call__(self, tokens):
        return self.head(self.up(self.embed(tokens)), self.embed.embedding[...])


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("function", [quantize, qwix.quantize_nnx])
def test_the_rule_of_a_tied_head_is_its_reason(function, shares):
    model, rules = Tied(shares), {"head|embed": None, ".*": SMALL}
    found = function(model, rules, TOKENS)
    report = found[1] if isinstance(found, tuple) else found
    assert [p[::2] for p in report.float_parameters] == [
        ("embed/embedding", "rule 'head|embed'")
    ]
    assert [p.parameter for p in report.products] == ["up/kernel"]
    assert model.head.dot_general is lax.dot_general


class Equal(nnx.Module):
    """Modules that compare as they like, and have no hash."""

    __hash__ = None

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 32, rngs=rngs)
        self.w = nnx.Param(jnp.eye(32))

    def __eq__(self, other):
        raise AssertionError

    def __call__(self, x):
        return self.up(x @ self.w[...]) * (x @ x.mT).mean()


class Cyclic(nnx.Module):
    def __init__(self, keys):
        rngs = nnx.Rngs(0)
        self.layers = nnx.data({key: Equal(rngs) for key in keys})
        self.again = self.layers[keys[0]]
        for layer in self.layers.values():
            layer.model = self
            layer.models = nnx.data({"list": [self]})

    def __call__(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.again(x)


KEYS = {
    "numbers": (1, 2),
    "tuples": ((1, "a"), (2, "b")),
    "enums": tuple(enum.IntEnum("Kind", "A B")),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=list(KEYS))
def test_paths_are_those_of_any_keys(keys):
    layers = [f"layers/{key}" if key != keys[0] else "again" for key in keys]
    rules = {r"layers/[^/]*|again": SMALL, ".*@activations_[0-9]": SMALL}
    plain = {r"layers/.*/up|again/up": SMALL}
    x = X[0]
    model = Cyclic(keys)
    report = quantize(model, plain, x, quantize_rngs=nnx.Rngs(1))
    assert [p.parameter for p in report.products] == [f"{n}/up/kernel" for n in layers]
    model, report = qwix.quantize_nnx(Cyclic(keys), rules, x, quantize_rngs=nnx.Rngs(1))
    assert [p.parameter for p in report.products] == [f"{n}/w" for n in layers]
    assert sorted(p.name for p in report.activation_products) == sorted(
        [f"again@activations_{i}" for i in range(2)] + [f"{layers[1]}@activations_0"]
    )
    for layer in model.layers.values():
        assert layer.model is layer.models["list"][0] is model
    nnx.jit(lambda model: model(x))(model)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {name for name in stats if name.endswith("/w_dot_general")} == {
        f"{name}/w_dot_general" for name in layers
    }
