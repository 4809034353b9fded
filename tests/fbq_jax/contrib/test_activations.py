"""Products of two activations, which rules name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix as google_qwix
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import FallbackDot, FallbackEinsum, Recipe, fallback_stats, recipes
from fbq_jax.contrib import qwix
from fbq_jax.recipes.rules_report import ActivationProduct
from tests.fbq_jax.contrib.test_qwix import OwnNnx
from tests.fbq_jax.linen.test_whole_models import KEY, X, train
from tests.fbq_jax.nnx.test_whole_models import descend

SMALL = Recipe(block=32)
OTHER = Recipe(block=64)
BOTH = {".*@activations_0": SMALL, ".*@activations_1": OTHER}
QK, AV = "btd,bsd->bts", "bts,bsd->btd"


class Layer(nn.Module):
    """Attention in own code; by hand with ops for both products and the weight."""

    ops: object = (jnp.einsum, jnp.einsum, jnp.einsum)

    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", nn.initializers.lecun_normal(), (32, 32))
        v = self.ops[2]("btd,df->btf", x, w)
        scores = self.ops[0](QK, x / jnp.sqrt(32.0), x)
        x = x + self.ops[1](AV, nn.softmax(scores), v) @ jnp.ones((32, 1))
        return x, None


class Unrolled(nn.Module):
    ops: object = Layer.ops

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = Layer(self.ops)(x)
        return x


class Scanned(nn.Module):
    ops: object = Layer.ops

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0} | ({} if self.ops is Layer.ops else {"fallback": 0})
        layers = nn.scan(nn.remat(Layer), axes, split_rngs={"params": True}, length=2)
        return layers(self.ops, name="layers")(x, None)[0]


def einsum(recipe):
    return FallbackEinsum(FallbackDot(recipe))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [Unrolled, Scanned])
def test_products_in_own_code_have_the_bits_of_injection_by_hand(model):
    rules = {**BOTH, ".*": recipes.block}
    quantized, report = qwix.quantize(model(), rules, KEY, X)
    by_hand = model((einsum(SMALL), einsum(OTHER), einsum(recipes.block)))
    variables = train(quantized)
    jax.tree.map(np.testing.assert_array_equal, variables, train(by_hand))
    assert report.unused_rules == ()
    layer = report.activation_products[0].name.partition("@")[0]
    scores, mixed, ones = report.activation_products[:3]
    assert scores == (f"{layer}@activations_0", X.shape, ".*@activations_0", SMALL)
    assert mixed == (f"{layer}@activations_1", X.shape, ".*@activations_1", OTHER)
    assert ones == (f"{layer}@activations_2", (32, 1), None, None)
    counts = [s.count for s in fallback_stats(variables).values()]
    assert len(counts) == 3 * (2 if model is Unrolled else 1)
    assert all(jnp.all(count == 2) for count in counts)


def test_products_stay_in_float_unless_a_pattern_has_the_mark():
    model, report = qwix.quantize(Unrolled(), {".*": SMALL}, KEY, X)
    assert {p.recipe for p in report.activation_products} == {None}
    assert len(report.activation_products) == 6
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert "Layer_0@activations_0 4 x 8 x 32 float: no rule names it" in lines
    rules = {"Layer_0@.*": None, ".*@activations_[01]": SMALL, ".*@other": SMALL}
    model, report = qwix.quantize(Unrolled(), rules, KEY, X)
    assert sorted(fallback_stats(jax.eval_shape(model.init, KEY, X))) == [
        "Layer_1",
        "Layer_1/dot_general_1",
    ]
    assert report.unused_rules == (".*@other",)
    assert "float: rule 'Layer_0@.*'" in str(report)


class Attention(nn.Module):
    ops: object = (None, None)
    precision: object = None

    @nn.compact
    def __call__(self, x):
        qk, av = (op and (lambda op=op: op) for op in self.ops)
        given = {"precision": self.precision, "qk_attn_weights_einsum_cls": qk}
        given["attn_weights_value_einsum_cls"] = av
        return nn.MultiHeadDotProductAttention(2, name="attn", **given)(x)


@pytest.mark.exhaustive
def test_flax_attention_has_the_bits_of_injection_by_hand():
    model, report = fbq_jax.quantize(Attention(), BOTH, KEY, X)
    variables = train(model)
    by_hand = train(Attention((einsum(SMALL), einsum(OTHER))))
    jax.tree.map(np.testing.assert_array_equal, variables, by_hand)
    assert report.activation_products == tuple(
        ActivationProduct(f"attn{rule[2:]}", (4, 8, 2, 16), rule, recipe)
        for rule, recipe in BOTH.items()
    )
    assert report.unused_rules == ()


def test_a_precision_excludes_quantized_products_of_flax_attention():
    precise = Attention(precision=jax.lax.Precision.HIGHEST)
    with pytest.raises(ValueError, match=r"'attn': .* with precision=HIGHEST. Omit"):
        fbq_jax.quantize(precise, BOTH, KEY, X)
    fbq_jax.quantize(precise, {".*@activations_0": None}, KEY, X)


class NnxLayer(nnx.Module):
    def __init__(self, rngs, ops=None):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 6)
        self.ops = nnx.data(ops) if ops else None

    def __call__(self, x):
        qk, av = self.ops or (jnp.einsum, jnp.einsum)
        scores = qk(QK, x / jnp.sqrt(32.0), x)
        values = jnp.einsum("btd,df->btf", x, self.w[...])
        return x + av(AV, nnx.softmax(scores), values)


class NnxModel(nnx.Module):
    def __init__(self, ops=((), ())):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([NnxLayer(rngs, op) for op in ops])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        return x


@pytest.mark.exhaustive
def test_nnx_products_have_the_bits_of_injection_by_hand():
    rngs = nnx.Rngs(1)
    by_hand = [
        tuple(fbq_jax.nnx.FallbackEinsum(r, rngs=rngs) for r in (SMALL, OTHER))
        for _ in range(2)
    ]
    by_hand = NnxModel(by_hand)
    descend(by_hand, X)
    model, _ = qwix.quantize_nnx(
        NnxModel(), {".*": OTHER}, X, quantize_rngs=nnx.Rngs(2)
    )
    rules = {**BOTH, ".*": None}  # again, in place of the rules before
    model, report = qwix.quantize_nnx(model, rules, X, quantize_rngs=nnx.Rngs(1))
    descend(model, X)
    for layer, expected in zip(model.layers, by_hand.layers, strict=True):
        np.testing.assert_array_equal(layer.w[...], expected.w[...])
    assert [p.name for p in report.activation_products] == [
        f"layers/{layer}@activations_{number}" for layer in "01" for number in "01"
    ]
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {name: int(s.count) for name, s in stats.items()} == {
        p.name.replace("@", "/") + "_dot_general": 2 for p in report.activation_products
    }


def test_rules_leave_nothing_behind():
    model = NnxModel()
    model, _ = qwix.quantize_nnx(model, {".*": None}, X)
    before = nnx.graphdef(model)
    model, _ = qwix.quantize_nnx(model, BOTH, X)
    assert len(jax.tree.leaves(nnx.state(model))) == 2 + 4 * 4
    model, report = qwix.quantize_nnx(model, {".*": None}, X)
    assert nnx.graphdef(model) == before
    assert len(report.activation_products) == 4
    with pytest.raises(ValueError, match=r"'\.\*@activations_0' .*: use fbq_jax\.con"):
        fbq_jax.nnx.quantize(model, BOTH)


def test_both_operands_may_be_one_array():
    gram = OwnNnx(lambda _, x: jnp.einsum(QK, x, x))
    model, _ = qwix.quantize_nnx(gram, {"@activations_0": recipes.rowwise}, X)
    y = nnx.jit(lambda model: model(X))(model)
    by_hand = fbq_jax.nnx.FallbackEinsum(recipes.rowwise)
    np.testing.assert_array_equal(y, nnx.jit(lambda op: op(QK, X, X))(by_hand))


@pytest.mark.parametrize(
    "einsum",
    [
        lambda x, cache: jnp.einsum("td,fd->ft", x, cache),
        lambda x, cache: jnp.einsum(x, [0, 1], cache, [2, 1], [2, 0]),
    ],
)
def test_the_second_operand_may_be_a_variable(einsum):
    """JAX swaps these operands, so the first one has to be found again."""
    cache, x = nnx.Cache(jnp.ones((16, 32))), X[0]
    model = OwnNnx(lambda m, x: einsum(x, m.cache), cache=cache)
    _, report = qwix.quantize_nnx(model, {"@activations_0": SMALL}, x)
    assert [product.shape for product in report.activation_products] == [(16, 32)]


@pytest.mark.exhaustive
def test_products_of_frozen_linen_models_stay_quantized():
    started = Recipe(block=32, start=2.0)
    rules = {".*@.*": started, ".*": recipes.block}
    model, _ = fbq_jax.quantize(Attention(), rules, KEY, X)
    variables = jax.jit(model.init)(KEY, X)
    frozen = fbq_jax.freeze(model, variables, X)
    serve = jax.jit(model.apply)
    np.testing.assert_array_equal(serve(frozen, X), serve(variables, X))
    assert "weight" in frozen["fallback"]["attn"]["query"]["dot_general"]
    assert "weight" not in frozen["fallback"]["attn"]["dot_general"]
    model, _ = fbq_jax.quantize(Attention(), {".*@.*": started}, KEY, X)
    with pytest.raises(ValueError, match="found no layer with a weight"):
        fbq_jax.freeze(model, jax.jit(model.init)(KEY, X), X)


@pytest.mark.exhaustive
def test_products_of_frozen_nnx_models_stay_quantized():
    model = NnxModel()
    started = Recipe(block=32, start=2.0)
    model, _ = qwix.quantize_nnx(model, {".*@.*": started, ".*": recipes.block}, X)
    frozen = fbq_jax.nnx.freeze(model, X)
    model.eval()
    serve = nnx.jit(lambda model: model(X))
    np.testing.assert_array_equal(serve(frozen), serve(model))
    assert not hasattr(frozen.layers[0].activations_0_dot_general.weight, "codes")


class WithLayer(nnx.Module):
    def __init__(self, rngs):
        self.value = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return x + jnp.einsum(AV, nnx.softmax(x @ x.mT), self.value(x))


class WithWeight(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 6)

    def __call__(self, x):
        return x + jnp.einsum(AV, nnx.softmax(x @ x.mT), jnp.dot(x, self.w[...]))


class Mix(nnx.Module):
    """It has no variables, unlike the module around it."""

    def __call__(self, x, values):
        return jnp.einsum(AV, nnx.softmax(x @ x.mT), values)


class WithMix(WithWeight):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.mix = Mix()

    def __call__(self, x):
        return x + self.mix(x, x @ self.w[...])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", [WithLayer, WithWeight, WithMix])
@pytest.mark.parametrize("weights", [None, recipes.block])
def test_a_stack_of_layers_has_a_state_for_each(layer, weights):
    def apply(model, x):
        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        return nnx.scan(lambda x, layer: layer(x), **axes)(x, model.layers)

    make = nnx.split_rngs(splits=2)(nnx.vmap(layer))
    model, rules = OwnNnx(apply, layers=make(nnx.Rngs(0))), {**BOTH, ".*": weights}
    model, report = qwix.quantize_nnx(model, rules, X, quantize_rngs=nnx.Rngs(1))
    assert report.unused_rules == ()
    nnx.jit(lambda model: model(X))(model)
    model(X)  # outside jit, JAX runs one layer after the other
    stats = fbq_jax.nnx.fallback_stats(model)
    assert len(stats) == 2 + (weights is not None)
    assert {tuple(s.count.tolist()) for s in stats.values()} == {(2, 2)}
    names = [product.name for product in report.activation_products]
    place = "layers/mix" if layer is WithMix else "layers"
    assert names == [f"{place}@activations_{number}" for number in range(2)]


def test_a_product_whose_state_cannot_leave_is_no_effect():
    """Flax's NNX attention is inside a ``jax.vmap``."""
    model = nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="quantize nothing") as caught:
        model, report = qwix.quantize_nnx(model, BOTH, X)
    assert caught[0].filename == __file__
    assert report.unused_rules == tuple(BOTH)
    assert report.activation_products == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Qwix
def test_lora_is_no_activation():
    provider = google_qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)
    model = NnxLayer(nnx.Rngs(0))
    model = google_qwix.apply_lora_to_model(model, provider, X, rngs=nnx.Rngs(1))
    model, report = qwix.quantize_nnx(model, {**BOTH, ".*": None}, X)
    floats = [p.parameter for p in report.float_parameters]
    assert floats == ["w", "w_lora_a", "w_lora_b"]
    names = [p.name for p in report.activation_products]
    assert names == ["@activations_0", "@activations_1"]
