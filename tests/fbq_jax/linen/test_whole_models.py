"""Whole Linen models, quantized without a change of their code."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import lift
from flax.linen import transforms

import fbq_jax
from fbq_jax import (
    FallbackConv,
    Fp8Dot,
    Recipe,
    RulesDot,
    SmoothSwiGLU,
    fallback_stats,
    flax_internals,
    quantize,
    recipes,
)
from fbq_jax.contrib import qwix
from fbq_jax.linen.einsum import Einsum, FallbackEinsum
from fbq_jax.recipes.rules_report import AMBIGUOUS, NOT_REACHED, WITHOUT_OP
from tests.marks import with_first_fast

SMALL = Recipe(block=32)
KEY = jax.random.key(1)
X = jax.random.normal(jax.random.key(0), (4, 8, 32))
RULES = {"head": None, ".*": SMALL}
HAND = RulesDot(RULES)


class Block(nn.Module):
    """A block; ``op`` is injected by hand, or None."""

    op: object = None

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(32, dot_general=self.op, name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(32, dot_general=self.op, name="down")(nn.silu(y)), None


class Unrolled(nn.Module):
    op: object = None
    block: object = Block
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x, _ = self.block(self.op, name=f"block_{i}")(x)
        return nn.Dense(8, dot_general=self.op, name="head")(x)


class Scanned(nn.Module):
    op: object = None

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0} | ({"fallback": 0} if self.op else {})
        blocks = nn.scan(nn.remat(Block), axes, split_rngs={"params": True}, length=3)
        x, _ = blocks(self.op, name="blocks")(x, None)
        return nn.Dense(8, dot_general=self.op, name="head")(x)


class Mapped(nn.Module):
    """A layer for each example."""

    op: object = None
    shared: bool = False

    @nn.compact
    def __call__(self, x):
        axes = {"params": None if self.shared else 0}
        axes |= {"fallback": 0} if self.op else {}
        rngs = {"params": not self.shared}
        blocks = nn.vmap(Block, variable_axes=axes, split_rngs=rngs, in_axes=(0, None))
        x, _ = blocks(self.op, name="blocks")(x[:, None], None)
        return nn.Dense(8, dot_general=self.op, name="head")(x)


class SharedSteps(nn.Module):
    """Steps of a scan with the same parameters, as in ALBERT."""

    op: object = None

    @nn.compact
    def __call__(self, x):
        axes = {"fallback": 0} if self.op else {}
        rngs = {"params": False}
        steps = nn.scan(
            Block, axes, variable_broadcast="params", split_rngs=rngs, length=3
        )
        x, _ = steps(self.op, name="blocks")(x, None)
        return nn.Dense(8, dot_general=self.op, name="head")(x)


class Setup(nn.Module):
    """Layers from ``setup``, several methods, and a layer that is called twice."""

    op: object = None

    def setup(self):
        self.up = nn.Dense(32, dot_general=self.op)
        self.head = nn.Dense(8, dot_general=self.op)

    def encode(self, x):
        return self.up(nn.silu(self.up(x)))

    def __call__(self, x):
        return self.head(self.encode(x))


class Patches(nn.Module):
    op: object = None

    @nn.compact
    def __call__(self, x):
        conv = FallbackConv(self.op) if self.op else None
        x = nn.Conv(32, (2,), strides=2, conv_general_dilated=conv, name="patch")(x)
        if self.op is None:
            x = nn.Einsum((32, 2, 16), "btd,dhk->bthk", name="mix")(x)
        else:
            op = FallbackEinsum(self.op)
            x = Einsum((32, 2, 16), "btd,dhk->bthk", einsum_op=op, name="mix")(x)
        attention = nn.MultiHeadDotProductAttention(
            2, qkv_dot_general=self.op, out_dot_general=self.op, name="attention"
        )
        x = attention(x.reshape(4, 4, 32))
        return nn.Dense(8, dot_general=self.op, name="head")(x)


class Cell(nn.RNNCellBase):
    op: object = None

    @nn.compact
    def __call__(self, h, x):
        x = nn.Dense(32, dot_general=self.op, name="input")(x)
        h = jnp.tanh(x + nn.Dense(32, dot_general=self.op, name="hidden")(h))
        return h, h

    def initialize_carry(self, rng, input_shape):
        del rng
        return jnp.zeros((*input_shape[:-1], 32))

    num_feature_axes = 1


class Recurrent(nn.Module):
    """Steps of time; with an op, their state is passed by hand."""

    op: object = None
    train: bool = False

    @nn.compact
    def __call__(self, x):
        collections = {}
        if self.op and self.train:
            collections["variable_carry"] = "fallback"
        elif self.op:
            collections["variable_broadcast"] = ("params", "fallback")
        x = nn.RNN(Cell(self.op), **collections)(x)
        return nn.Dense(8, dot_general=self.op, name="head")(x)


MODELS = {
    "unrolled": Unrolled,
    "jit": functools.partial(Unrolled, block=nn.jit(Block)),
    "scan": Scanned,
    "vmap": Mapped,
    "vmap, shared": functools.partial(Mapped, shared=True),
    "setup": Setup,
    "convolution, einsum and attention": Patches,
}


def train(model, steps=2):
    """The variables after steps of training on X."""
    variables = jax.jit(model.init)(KEY, X)
    for _ in range(steps):
        grads, state = gradients(model, variables, X)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        variables = {"params": params, **state}
    return variables


@pytest.mark.parametrize("name", with_first_fast(MODELS))
def test_same_bits_as_injection_by_hand(name):
    make = MODELS[name]
    model, report = quantize(make(), RULES, KEY, X)
    variables = train(model)
    jax.tree.map(np.testing.assert_array_equal, variables, train(make(HAND)))
    counts = [np.asarray(s.count) for s in fallback_stats(variables).values()]
    assert counts
    assert all(np.all((count == 2) | (count == 4)) for count in counts)  # up runs twice
    assert report.unused_rules == ()
    assert report.unmatched_layers == ()
    floats = {p.parameter: p.reason for p in report.float_parameters}
    assert floats.pop("head/kernel") == "rule 'head'"
    # Biases with an axis of heads, and what nn.vmap has stacked.
    assert {path.rpartition("/")[2] for path in floats} <= {"bias", "scale"}
    assert set(floats.values()) <= {NOT_REACHED, WITHOUT_OP}
    quantized = {p.layer for p in report.products}
    assert quantized == {path for path in report.layers if path != "head"}
    assert quantized == set(fallback_stats(variables))


@functools.partial(jax.jit, static_argnums=0)
def gradients(model, variables, x):
    """Those of the parameters, and the next state."""

    def loss(params):
        variables_ = {**variables, "params": params}
        y, state = model.apply(variables_, x, mutable=["fallback"])
        return jnp.mean(y**2), state

    return jax.grad(loss, has_aux=True)(variables["params"])


@pytest.mark.exhaustive
def test_steps_of_time_have_the_bits_of_layers_by_hand_and_take_any_length():
    """They share one state."""
    model, report = quantize(Recurrent(), RULES, KEY, X)
    assert {p.layer for p in report.products} == {"Cell_0/input", "Cell_0/hidden"}
    variables, hand = (jax.jit(m.init)(KEY, X) for m in (model, Recurrent(HAND)))
    jax.tree.map(np.testing.assert_array_equal, variables, hand)
    grads, state = gradients(model, variables, X)
    want = gradients(Recurrent(HAND, train=True), hand, X)
    jax.tree.map(np.testing.assert_array_equal, (grads, state), want)

    _, state = gradients(model, {**variables, **state}, X[:, :3])
    trained = {**variables, **state}
    assert [s.count for s in fallback_stats(trained).values()] == [8 + 3] * 2
    apply = jax.jit(model.apply)
    by_hand = jax.jit(Recurrent(HAND).apply)(trained, X[:, :5])
    np.testing.assert_array_equal(apply(trained, X[:, :5]), by_hand)
    frozen = fbq_jax.freeze(model, trained, X)
    np.testing.assert_array_equal(apply(frozen, X), apply(trained, X))


@pytest.mark.exhaustive
def test_steps_of_time_whose_state_is_a_gradient_have_one_each():
    dot = RulesDot(RULES, collection="_overwrite_with_gradient")
    model, _ = quantize(Recurrent(), dot, KEY, X)
    state = jax.eval_shape(model.init, KEY, X)["_overwrite_with_gradient"]
    assert {x.shape for x in jax.tree.leaves(state)} == {(8,)}


def test_evaluation_takes_any_number_of_examples_that_share_parameters():
    """They have the mean of the thresholds that are set."""
    model, _ = quantize(Mapped(shared=True), RULES, KEY, X)
    by_hand = Mapped(HAND, shared=True)
    variables = jax.jit(model.init)(KEY, X)

    def evaluate(model, *thetas):
        thetas = jnp.array(thetas)

        def replace(path, x):
            is_theta = "theta" in str(path[-1])
            return thetas.astype(x.dtype) if is_theta else x[: len(thetas)]

        state = jax.tree.map_with_path(replace, variables["fallback"])
        return jax.jit(model.apply)({**variables, "fallback": state}, X[:2])

    y = evaluate(model, 0.5, np.nan, -1.0, 15.5)
    np.testing.assert_array_equal(y, evaluate(by_hand, 8.0, 8.0))
    assert not np.array_equal(y, evaluate(by_hand, 0.5, 0.5))
    unset = evaluate(model, -1.0, -1.0, -1.0, -1.0)
    np.testing.assert_array_equal(unset, evaluate(by_hand, -1.0, -1.0))


def test_examples_that_share_parameters_share_codes():
    model, _ = quantize(Mapped(shared=True), {".*": recipes.rowwise}, KEY, X)
    variables = jax.jit(model.init)(KEY, X)
    frozen = fbq_jax.freeze(model, variables, X[:3])
    layers = frozen["fallback"]["blocks"].values()
    codes = [layer["dot_general"]["weight"].codes.main.codes for layer in layers]
    assert [array.shape for array in codes] == 2 * [(1, 32, 32)]
    apply = jax.jit(model.apply)
    np.testing.assert_array_equal(apply(frozen, X[:2]), apply(variables, X[:2]))


@pytest.mark.parametrize(
    "recipe", [pytest.param(SMALL, marks=pytest.mark.exhaustive), recipes.rowwise]
)
def test_examples_that_share_parameters_with_stacks_inside_and_around(recipe):
    class Nested(nn.Module):
        @nn.compact
        def __call__(self, x):
            def shared(module, **options):
                axes, rngs = {"params": None}, {"params": False}
                return nn.vmap(module, variable_axes=axes, split_rngs=rngs, **options)

            members = nn.vmap(
                shared(shared(Scanned)),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=2,
            )
            return members(name="members")(x[:, :, None])

    model, _ = quantize(Nested(), {".*": recipe}, KEY, X)
    variables = jax.jit(model.init)(KEY, X)
    apply = jax.jit(functools.partial(model.apply, mutable=["fallback"]))
    _, state = apply(variables, X)
    stats = fallback_stats(state)
    # Members, layers and examples.
    assert {name: s.theta.shape for name, s in stats.items()} == {
        "members/blocks/up": (2, 3, 8, 4),
        "members/blocks/down": (2, 3, 8, 4),
        "members/head": (2, 8, 4),
    }
    y = jax.jit(model.apply)({**variables, **state}, X[:3, :5])
    assert y.shape == (2, 3, 5, 1, 8)
    assert np.all(np.isfinite(y))


@pytest.mark.parametrize("collection", ["fallback", "_overwrite_with_gradient"])
def test_steps_that_share_parameters_have_a_seed_each(collection):
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(self.inner(x)[..., :1] + x)

    model, _ = quantize(SharedSteps(), RulesDot(RULES, collection), KEY, X)
    for model_ in (model, Outer(model)):
        variables = jax.jit(model_.init)(KEY, X)
        assert len(fallback_stats(variables, collection)) == 2  # without a warning
        blocks = variables[collection].get("inner", variables[collection])["blocks"]
        seeds = [layer["dot_general"]["seed"] for layer in blocks.values()]
        assert len(np.unique(seeds)) == 2 * 3
        assert np.max(seeds) < 2**24


def test_rules_that_quantize_nothing_warn():
    """A model that is left in float on purpose is fine."""
    message = r"'mlp', 'block' quantize nothing.* here are 'block_0/up', .*, \.\.\."
    with pytest.warns(UserWarning, match=message) as caught:
        quantize(Unrolled(), {"mlp": SMALL, "head": None, "block": SMALL}, KEY, X)
    assert caught[0].filename == __file__
    quantize(Unrolled(), {".*": None}, KEY, X)


@pytest.mark.exhaustive
def test_outside_its_model_nothing_is_quantized():
    """Not after a call, an error or a trace that JAX keeps."""
    block = nn.jit(Block)
    floats = Unrolled(block=block)
    variables = floats.init(KEY, X)
    before = floats.apply(variables, X)
    model, _ = quantize(floats, RULES, KEY, X)
    quantized = model.init(KEY, X)
    y = model.apply(quantized, X, mutable=["fallback"])[0]
    assert not np.array_equal(y, before)
    with pytest.raises(ValueError, match="has no state 'dot_general'"):
        model.apply(variables, X)
    assert sorted(floats.init(KEY, X)) == ["params"]
    np.testing.assert_array_equal(floats.apply(variables, X), before)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(near, quantized["params"], variables["params"])


def test_a_quantized_model_is_an_instance_of_its_class():
    model, _ = quantize(Unrolled(), RULES, KEY, X)
    assert isinstance(model, Unrolled)
    assert type(model).__name__ == "Unrolled"
    assert model.block is Block
    again, _ = quantize(Unrolled(), dict(RULES), KEY, X)
    assert model == again
    assert hash(model) == hash(again)  # a static argument of jit
    assert model != Unrolled()
    for copy in (model.clone(), model.copy(), pickle.loads(pickle.dumps(model))):
        assert copy == model
        assert "fallback" in jax.eval_shape(copy.init, KEY, X)
    other, report = quantize(model, {".*": None}, KEY, X)  # from the original
    assert sorted(jax.eval_shape(other.init, KEY, X)) == ["params"]
    assert report.products == ()


@pytest.mark.exhaustive
def test_all_methods_and_functions_of_the_model():
    model, _ = quantize(Setup(), {".*": SMALL}, KEY, X)
    variables = model.init(KEY, X)
    encode = functools.partial(model.apply, variables, X, mutable=["fallback"])
    for method in ("encode", Setup.encode, lambda model, x: model.up(model.up(x))):
        _, state = encode(method=method)
        assert int(state["fallback"]["up"]["dot_general"]["count"]) == 2
    only = jax.eval_shape(functools.partial(model.init, method="encode"), KEY, X)
    assert list(only["params"]) == ["up"]
    _, report = quantize(Setup(), {".*": SMALL}, KEY, X, method="encode")
    assert [p.parameter for p in report.products] == ["up/kernel"]


def test_layers_keep_an_op_of_their_own():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(32, dot_general=Fp8Dot(scaling="current"), name="fp8")(x)
            return nn.Dense(32, dot_general=fbq_jax.fallback_dot, name="own")(x)

    with pytest.warns(UserWarning, match=r"nothing \(a layer keeps the op that"):
        model, report = quantize(Model(), {".*": SMALL}, KEY, X)
    assert [(p.parameter, p.rule) for p in report.products] == [("own/kernel", None)]
    assert report.unused_rules == (".*",)
    assert report.unmatched_layers == ("fp8", "own")
    assert "own/kernel  32 x 32  own op  fallback" in str(report)
    assert list(fallback_stats(jax.eval_shape(model.init, KEY, X))) == ["own"]


def test_the_report_says_why_parameters_stay_in_float():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, scale, train):
            embed = nn.Embed(16, 32, name="embed")
            position = self.param("position", nn.initializers.ones, (1, 8, 32))
            raw = self.param("raw", nn.initializers.ones, (32, 32))
            self.param("unread", nn.initializers.ones, (2, 2))
            y = embed(tokens) * scale + position
            y = nn.Dropout(0.5, deterministic=not train)(y)
            layers = nn.scan(
                nn.remat(Scale), {"params": 0}, split_rngs={"params": True}, length=3
            )
            y, _ = layers(name="layers")(y, None)
            y = nn.Dense(32, name="free")(y) @ raw.astype(y.dtype).T
            return embed.attend(y)

    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.RMSNorm()(x), None

    tokens, scale = jax.ShapeDtypeStruct((4, 8), jnp.int32), jnp.ones((1, 1, 1))
    rules = {"free": SMALL, "nothing": None}
    with pytest.warns(UserWarning, match="'nothing' keep no layer in float"):
        _, report = quantize(Model(), rules, KEY, tokens, scale=scale, train=True)
    # The vectors in each of the scanned layers are none.
    assert [p[::2] for p in report.float_parameters] == [
        ("embed/embedding", WITHOUT_OP),
        ("position", WITHOUT_OP),
        ("raw", WITHOUT_OP),
        ("unread", WITHOUT_OP),
    ]
    assert report.unused_rules == ("nothing",)


def test_the_report_does_not_guess_which_parameter_a_product_reads():
    class Two(nn.Module):
        """Multiplies by one of two equal matrices in its own code."""

        @nn.compact
        def __call__(self, x):
            normal = nn.initializers.normal()
            a, b = (self.param(name, normal, (32, 32)) for name in "ab")
            c = self.param("c", normal, (32, 8))
            x = HAND(x, (a + 0).T, (((2,), (0,)), ((), ()))) @ b
            return HAND(x, c, (((2,), (0,)), ((), ())))

    report = HAND.report(Two(), KEY, X)
    assert [p.parameter for p in report.products] == ["c", ""]
    assert [p[::2] for p in report.float_parameters] == [
        ("a", AMBIGUOUS),
        ("b", AMBIGUOUS),
    ]


@pytest.mark.parametrize("smooth", with_first_fast(["per_channel", "per_token"]))
def test_the_report_has_layers_that_scale_their_weight_by_the_input(smooth):
    _, report = quantize(SmoothSwiGLU(64, smooth), {".*": SMALL}, KEY, X)
    assert sorted(p[:4] for p in report.products) == [
        ("down/kernel", (64, 32), "down", ".*"),
        ("gate/kernel", (32, 64), "gate", ".*"),
        ("up/kernel", (32, 64), "up", ".*"),
    ]
    assert report.float_parameters == ()


class Tied(nn.Module):
    op: object = None

    def setup(self):
        self.embed = nn.Embed(16, 32)
        self.up = nn.Dense(32, dot_general=self.op)
        self.head = nn.Dense(16, dot_general=self.op, use_bias=False)

    def __call__(self, x):
        x = self.up(x) + self.embed(jnp.zeros((1, 1), jnp.int32))
        kernel = self.embed.variables["params"]["embedding"].T
        return self.head.apply({"params": {"kernel": kernel}}, x)


def test_a_tied_head_by_a_nested_apply_has_its_place_in_the_model():
    """Ops do not know of whom its weight is, so it is not frozen."""
    rules = {".*": Recipe(block=32, start=2.0)}
    tied, report = quantize(Tied(), rules, KEY, X)
    products = {p.parameter: p.layer for p in report.products}
    assert products == {"head": "head", "up/kernel": "up"}
    assert report.unmatched_layers == ()
    (in_float,) = report.float_parameters
    assert in_float[::2] == ("embed/embedding", WITHOUT_OP)
    variables = jax.jit(tied.init)(KEY, X)
    for model in (tied, Tied(RulesDot(rules))):
        apply = jax.jit(functools.partial(model.apply, mutable=["fallback"]))
        stats = fallback_stats(apply(variables, X)[1])
        assert {name: int(s.count) for name, s in stats.items()} == {"head": 1, "up": 1}
        frozen = fbq_jax.freeze(model, variables, X)
        assert "weight" in frozen["fallback"]["up"]["dot_general"]
        assert frozen["fallback"]["head"] == variables["fallback"]["head"]
        serve = jax.jit(model.apply)
        np.testing.assert_array_equal(serve(frozen, X), serve(variables, X))


@pytest.mark.parametrize("function", [quantize, qwix.quantize])
def test_the_rule_of_a_tied_head_is_its_reason(function):
    rules = {"head": None, ".*": recipes.block}
    _, report = function(Tied(), rules, KEY, X)
    assert [p[::2] for p in report.float_parameters] == [
        ("embed/embedding", "rule 'head'")
    ]


def test_a_model_with_variables_of_its_own_keeps_its_state():
    teacher = Setup(op=HAND)
    frozen = teacher.init(KEY, X)

    class Student(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="student")(x) - teacher.apply(frozen, x)

    model, _ = quantize(Student(), {".*": SMALL}, KEY, X)
    assert list(fallback_stats(jax.eval_shape(model.init, KEY, X))) == ["student"]


def test_attention_with_a_cache_takes_the_arguments_of_init():
    layer = nn.MultiHeadDotProductAttention(4, decode=True)
    model, report = quantize(layer, {".*": SMALL}, KEY, X)
    assert not report.unmatched_layers
    variables = model.init(KEY, X)
    y, _ = model.apply(variables, X[:, :1], mutable=["cache"])
    expected, _ = layer.apply(variables, X[:, :1], mutable=["cache"])
    error = jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)
    assert 0.0 < error < 0.05


def test_a_bound_model_is_named():
    model = Setup()
    with pytest.raises(ValueError, match="takes an unbound model; this Setup is"):
        quantize(model.bind(model.init(KEY, X)), RULES, KEY, X)


def test_a_quantized_model_inside_has_its_own_rules():
    """The path in that model decides, and what is around it stays in float."""

    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="last")(self.inner(x))

    inner, _ = quantize(Setup(), {"up": SMALL}, KEY, X)
    variables = jax.eval_shape(Outer(inner).init, KEY, X)
    assert list(fallback_stats(variables)) == ["inner/up"]
    outer, report = quantize(Outer(inner), {".*": recipes.block}, KEY, X)
    variables = jax.eval_shape(outer.init, KEY, X)
    assert list(fallback_stats(variables)) == ["inner/up", "last"]
    assert report.unmatched_layers == ()
    assert [(p.parameter, p.rule, p.recipe) for p in report.products] == [
        ("inner/up/kernel", None, SMALL),
        ("last/kernel", ".*", recipes.block),
    ]


@pytest.mark.parametrize("module", ["flax.core.lift", "flax.core.gone"])
def test_another_flax_is_named(module):
    message = rf"know flax \S+, which has no {module}._gone \(why\): it knows flax 0"
    with pytest.raises(ImportError, match=message):
        flax_internals.find_private(module, "_gone", "why")


def test_flax_is_itself_again_after_a_quantized_model():
    before = lift._split_in_out_axes, transforms._module_fingerprint
    model, _ = quantize(Unrolled(), RULES, KEY, X)
    jax.eval_shape(model.init, KEY, X)
    with pytest.raises(TypeError):
        model.apply({}, X, unknown=1)
    assert before == (lift._split_in_out_axes, transforms._module_fingerprint)


def test_a_precision_is_ignored_on_request_and_the_report_says_so():
    def make(precision=None, op=None):
        return nn.Dense(32, precision=precision, dot_general=op)

    rules = {".*": recipes.block}
    with pytest.raises(ValueError, match=r"layer .*: precision=highest.*RulesDot"):
        quantize(make("highest"), rules, KEY, X)
    ignoring = RulesDot(rules, ignore_precision=True)
    model, report = quantize(make("highest"), ignoring, KEY, X)
    assert str(report).splitlines()[1].endswith("block, precision ignored")
    variables = make(op=ignoring).init(KEY, X)
    expected = make(op=RulesDot(rules)).apply(variables, X)
    np.testing.assert_array_equal(model.apply(variables, X), expected)
    assert not quantize(make(), ignoring, KEY, X)[1].products[0].ignores_precision


def test_a_block_with_an_int8_data_flow_takes_no_rule():
    model = nn.Sequential([fbq_jax.Int8MLP(64), nn.Dense(64)])
    x = jnp.ones((32, 64))
    _, report = fbq_jax.quantize(model, {".*": recipes.block}, jax.random.key(0), x)
    assert [p.parameter for p in report.products] == ["layers_1/kernel"]
    assert not report.float_parameters
