"""Rules for whole models, in Linen and in NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import FallbackDot, GatedMLP, Recipe, RulesDot, fallback_stats, recipes
from fbq_jax.nnx import quantize
from fbq_jax.nnx.dot import FallbackState

SMALL = Recipe(block=32)
PLAIN = Recipe(block=32, criterion=None)
RULES = {"head": None, "mlp/down": PLAIN, "mlp/.*": SMALL, "mlp/up": None}
X = jax.random.normal(jax.random.key(0), (64, 32))


class Mlp(nn.Module):
    up: object
    down: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(48, dot_general=self.up, name="up")(x)
        return nn.Dense(32, dot_general=self.down, name="down")(nn.silu(x))


class Model(nn.Module):
    up: object
    down: object
    head: object

    @nn.compact
    def __call__(self, x):
        x = Mlp(self.up, self.down, name="mlp")(x)
        return nn.Dense(8, dot_general=self.head, name="head")(x)


@functools.partial(jax.jit, static_argnums=0)
def first_step(model):
    """The variables, the output and the new state."""
    variables = model.init(jax.random.key(1), X)
    return variables, model.apply(variables, X, mutable=["fallback"])


def test_layers_match_layers_with_their_own_dots():
    dot = RulesDot(RULES)
    ruled = first_step(Model(dot, dot, dot))
    explicit = first_step(Model(FallbackDot(SMALL), FallbackDot(PLAIN), None))
    assert sorted(fallback_stats(ruled[0])) == ["mlp/down", "mlp/up"]
    jax.tree.map(np.testing.assert_array_equal, ruled, explicit)


def test_report_lists_unused_rules_and_unmatched_layers():
    dot = RulesDot({**RULES, "ml": SMALL})
    report = dot.report(Model(dot, dot, FallbackDot()), jax.random.key(0), X)
    assert report.layers == {"mlp/up": "mlp/.*", "mlp/down": "mlp/down"}
    assert report.unused_rules == ("head", "mlp/up", "ml")
    assert report.unmatched_layers == ("head",)


LIFTED_CALLS = {
    "function": (nn.Dense, nn.remat(lambda layer, x: layer(x))),
    "jitted layer": (nn.jit(nn.Dense), lambda layer, x: layer(x)),
    "jitted function": (nn.Dense, nn.jit(lambda layer, x: layer(x))),
}


@pytest.mark.parametrize("name", LIFTED_CALLS)
def test_layers_in_lifted_functions_have_their_own_rules(name):
    """A lifted function is no layer, and leaves numbers to the names of others."""
    kind, call = LIFTED_CALLS[name]

    class Model(nn.Module):
        op: object = None

        @nn.compact
        def __call__(self, x):
            for layer in ("0", "second", "1"):
                x = call(kind(32, dot_general=self.op, name=layer), x)
            return x

    rules, key = {"second": None, ".*": SMALL}, jax.random.key(0)
    ruled, report = fbq_jax.quantize(Model(), rules, key, X)
    assert report.layers == {"0": ".*", "second": "second", "1": ".*"}
    assert report.unmatched_layers == ()
    assert [p.parameter for p in report.products] == ["0/kernel", "1/kernel"]
    for model in (Model(RulesDot(rules)), ruled):
        for _ in range(2):
            variables = model.init(key, X)
            assert sorted(variables["fallback"]) == ["0", "1"]
            _, state = model.apply(variables, X, mutable=["fallback"])
            assert [int(s.count) for s in fallback_stats(state).values()] == [1, 1]


def test_paths_under_lifted_transforms():
    """That of the root layer is empty."""
    dot = RulesDot({"layers/mlp/up": SMALL, "": SMALL, ".*": None})

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Mlp(dot, dot, name="mlp")(x), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "fallback": 0}
            rngs = {"params": True}
            layers = nn.scan(nn.remat(Layer), axes, split_rngs=rngs, length=3)
            return layers(name="layers")(x, None)[0]

    for _ in range(2):  # cached traces do not hide layers
        report = dot.report(Scanned(), jax.random.key(0), X)
        assert report.layers == {
            "layers/mlp/up": "layers/mlp/up",
            "layers/mlp/down": ".*",
        }
    stats = fallback_stats(jax.eval_shape(Scanned().init, jax.random.key(0), X))
    assert {name: s.count.shape for name, s in stats.items()} == {"layers/mlp/up": (3,)}
    layer = nn.Dense(8, dot_general=dot)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    assert list(fallback_stats(variables)) == ["(root)"]


def test_rules_are_a_value():
    dot = RulesDot(RULES, collection="aqt")
    assert dot == RulesDot(dict(RULES), "aqt")
    assert hash(dot) == hash(RulesDot(dict(RULES), "aqt"))
    assert dot != RulesDot(dict(reversed(RULES.items())), "aqt")


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"mlp/(": SMALL}, ValueError, r"'mlp/\(' is not a regular .* at position 4"),
        ({"mlp": "int8"}, TypeError, "rule 'mlp' takes a Recipe, .* got 'int8'"),
        ({7: SMALL}, TypeError, "pattern is a string; got 7"),
        (recipes.block, TypeError, r"rules are a mapping .*; got Recipe\("),
    ],
)
def test_bad_rules_are_named(rules, error, message):
    with pytest.raises(error, match=message):
        RulesDot(rules)
    with pytest.raises(error, match=message):
        quantize(nnx.Linear(32, 8, rngs=nnx.Rngs(0)), rules)


RULED = RulesDot(RULES)


RULED, KEY = RulesDot(RULES), jax.random.key(0)
MATMUL = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RULED(X, X.T, MATMUL), ValueError, "by the path of the Linen layer"),
        (
            lambda: GatedMLP(32, dot_general=recipes.block).init(KEY, X),
            TypeError,
            r"FallbackDot.*, not the recipe itself",
        ),
        (lambda: RulesDot(RULES, "params"), ValueError, "is for parameters; keep the"),
    ],
)
def test_unsupported_uses_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.down = nnx.LinearGeneral(
            48, 32, dot_general_cls=lambda: jax.lax.dot_general, rngs=rngs
        )

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp = NnxMlp(rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)
        self.probe = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.mlp(x))


def test_each_nnx_layer_gets_its_own_dot():
    model, rngs = NnxModel(nnx.Rngs(1)), nnx.Rngs(2)
    with pytest.warns(UserWarning, match="'mlp/up' keep no layer in float"):
        report = quantize(model, RULES, quantize_rngs=rngs)
    assert report.layers == {"head": "head", "mlp/down": "mlp/down", "mlp/up": "mlp/.*"}
    assert report.unused_rules == ("mlp/up",)
    assert report.unmatched_layers == ("probe",)
    nnx.jit(lambda model, x: model(x))(model, X)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: int(s.count) for path, s in stats.items()} == {
        "mlp/down": 1,
        "mlp/up": 1,
    }
    up, down = model.mlp.up.dot_general, model.mlp.down.dot_general
    assert (up.recipe, down.recipe) == (SMALL, PLAIN)
    assert up.seed[...] != down.seed[...]

    quantize(model, {".*": None})  # unquantized again
    assert fbq_jax.nnx.fallback_stats(model) == {}
    np.testing.assert_array_equal(model(X), NnxModel(nnx.Rngs(1))(X))


def nnx_stack(rules, out_axes=0):
    """Three MLPs, with rules applied where one of them is made."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(out_axes=out_axes)
    def layers(rngs):
        mlp = NnxMlp(rngs)
        quantize(mlp, rules, quantize_rngs=rngs)
        return mlp

    return layers(nnx.Rngs(0))


@pytest.mark.exhaustive
def test_nnx_stacks_take_rules_before_and_after_they_are_made():
    stack, floats = nnx_stack({".*": SMALL}), nnx_stack({})
    quantize(floats, {".*": SMALL}, quantize_rngs=nnx.Rngs(3))
    for model in (stack, floats):
        seeds = [model.up.dot_general.seed[...], model.down.dot_general.seed[...]]
        assert np.unique(seeds).size == 6
    nnx.update(floats, nnx.state(stack, FallbackState))

    @nnx.jit
    def call(model, x):
        scan = nnx.scan(
            lambda x, mlp: mlp(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return nnx.grad(lambda model: jnp.sum(scan(x, model) ** 2))(model)

    grads = call(stack, X), call(floats, X)
    jax.tree.map(np.testing.assert_array_equal, *grads)
    assert floats.up.dot_general.count[...].tolist() == [1, 1, 1]


def test_nnx_stacks_have_their_axis_first():
    floats = nnx_stack({}, out_axes=1)
    quantize(floats, {".*": None})
    with pytest.raises(ValueError, match=r"'up' .* \(32, 3, 48\), .* \(32, 48\): a st"):
        quantize(floats, {"down": None, "up": SMALL})
    assert fbq_jax.nnx.fallback_stats(floats) == {}
