"""Recipes that the library chooses, and its receipts."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import recipes
from fbq_jax.choice import ChoiceReport, Product, choose_from, choosing
from fbq_jax.choice.products import Recorder

DEPTH, WIDTH, TOKENS = 5, 128, 256
PLANTED = 1, 3  # layers


def mean_square(y):
    return jnp.mean(jnp.square(y))


class Block(nn.Module):
    """A layer whose input has an outlier in some tokens, if it is planted."""

    @nn.compact
    def __call__(self, x):
        gain = self.param("gain", nn.initializers.ones, (WIDTH,))
        h = nn.LayerNorm(use_bias=False, use_scale=False)(x)
        few = jnp.arange(len(x))[:, None] % 64 == 0
        h = jnp.where(few, h * gain[None], h)
        return x + nn.Dense(WIDTH, use_bias=False, name="dense")(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            x = Block(name=f"block_{i}")(x)
        return x


@pytest.fixture(scope="module")
def planted():
    """A model, its variables, and its input."""
    model, x = Model(), jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    variables = model.init(jax.random.key(1), x)
    for i in PLANTED:
        gain = variables["params"][f"block_{i}"]["gain"]
        variables["params"][f"block_{i}"]["gain"] = gain.at[5].set(300.0)
    return model, variables, x


@pytest.fixture(scope="module")
def chosen(planted):
    model, variables, x = planted
    return fbq_jax.choose_recipes(model, variables, x, loss=mean_square)


def test_planted_outliers_are_found_and_no_others(chosen):
    rules, report = chosen
    expected = {
        f"block_{i}/dense": recipes.row_block_lhs if i in PLANTED else recipes.block
        for i in range(DEPTH)
    }
    assert rules == expected
    for layer in report.layers:
        is_planted = int(layer.layer.split("_")[1].split("/")[0]) in PLANTED
        assert (layer.largest > 50) == is_planted
        assert (layer.candidates[0].error > report.budget) == is_planted


def test_the_rules_quantize_the_model(planted, chosen):
    model, variables, x = planted
    quantized, report = fbq_jax.quantize(model, chosen[0], jax.random.key(0), x)
    assert len(report.products) == DEPTH
    assert not report.unused_rules
    state = quantized.init(jax.random.key(0), x)["fallback"]
    y = quantized.apply({**variables, "fallback": state}, x)
    exact = model.apply(variables, x)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.03


def test_the_report_says_what_was_measured(chosen):
    lines = str(chosen[1]).splitlines()
    assert lines[0].split()[:4] == ["layer", "M,", "K,", "N"]
    row = next(line for line in lines if line.startswith("block_3/dense"))
    assert "row_block_lhs" in row
    assert "above the budget: block" in row
    assert "at most 0.03; on" in lines[-1]


def test_a_report_is_stored(chosen, tmp_path):
    file = tmp_path / "report.json"
    chosen[1].save(file)
    assert ChoiceReport.load(file) == chosen[1]
    file.write_text(json.dumps({"layers": 3}))
    with pytest.raises(ValueError, match=r"report\.json holds no report"):
        ChoiceReport.load(file)


def test_a_loaded_report_cannot_look(chosen, tmp_path):
    chosen[1].save(tmp_path / "report.json")
    with pytest.raises(ValueError, match="call choose_recipes"):
        ChoiceReport.load(tmp_path / "report.json").check()


def test_the_picture_shows_each_layer(chosen):
    (axes,) = chosen[1].draw().axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [layer.layer for layer in chosen[1].layers]


def test_layers_of_a_stack_share_a_recipe():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(WIDTH, name="dense")(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(Layer, length=3, **options)(name="layers")(x, None)[0]

    x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    variables = Stack().init(jax.random.key(1), x)
    _, report = fbq_jax.choose_recipes(
        Stack(), variables, x, loss=mean_square, candidates=["block"]
    )
    (layer,) = report.layers
    assert layer[:2] == ("layers/dense", ((TOKENS, WIDTH, WIDTH),) * 3)
    assert f"3 x {TOKENS}, {WIDTH}, {WIDTH}" in str(report)


def test_nnx():
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    model, x = Mlp(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    rules, report = fbq_jax.nnx.choose_recipes(
        model, x, loss=mean_square, candidates=["block", "rowwise"]
    )
    assert rules == {"up": recipes.block, "down": recipes.block}
    assert [layer.sizes for layer in report.layers] == [
        ((TOKENS, 2 * WIDTH, WIDTH),),
        ((TOKENS, WIDTH, 2 * WIDTH),),
    ]


@pytest.mark.parametrize("is_nnx", [False, True])
def test_a_model_that_is_one_layer(is_nnx):
    x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    options = {"loss": mean_square, "candidates": ["block"]}
    if is_nnx:
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        rules, report = fbq_jax.nnx.choose_recipes(model, x, **options)
        quantized = fbq_jax.nnx.quantize(model, rules)
    else:
        model = nn.Dense(WIDTH)
        variables = model.init(jax.random.key(1), x)
        rules, report = fbq_jax.choose_recipes(model, variables, x, **options)
        _, quantized = fbq_jax.quantize(model, rules, jax.random.key(0), x)
    assert rules == {"": recipes.block}
    assert quantized.layers == {"": ""}
    assert "(root)" in str(report)


def test_slow_layers_stay_in_float(planted, monkeypatch):
    """Where the device is measured, the fastest candidate inside the budget wins."""
    model, variables, x = planted

    def times(sizes, dtype, names):
        assert (sizes, dtype) == ((TOKENS, WIDTH, WIDTH), "float32")
        assert names == ("block", "row_block_lhs")
        return {"float": 1.0, "block": 1.5, "row_block_lhs": 0.5}

    monkeypatch.setattr(choosing, "layer_ms", times)
    monkeypatch.setattr(choosing, "_SETTLING_STEPS", 0)
    monkeypatch.setattr(choosing, "_SECONDS", 0.01)
    names = ["block", "row_block_lhs"]
    _, report = fbq_jax.choose_recipes(
        model, variables, x, loss=mean_square, candidates=names
    )
    assert {layer.chosen for layer in report.layers} == {"row_block_lhs"}
    assert report.predicted_ms == pytest.approx(report.float_ms - 0.5 * DEPTH)
    assert report.chosen_ms > 0
    assert "x), measured" in str(report)
    rules, report = fbq_jax.choose_recipes(
        model, variables, x, loss=mean_square, candidates=names, budget=1e-6
    )
    assert set(rules.values()) == {None}
    assert "no candidate is inside" in report.layers[0].reason


def test_a_module_with_several_parameters_is_measured_by_all_of_them(monkeypatch):
    """In any order, as the products of a step are recorded."""
    up, down = (TOKENS, WIDTH, 2 * WIDTH), (TOKENS, 2 * WIDTH, WIDTH)
    ms = {up: {"float": 3.0, "block": 1.0}, down: {"float": 2.0, "block": 4.0}}
    monkeypatch.setattr(choosing, "layer_ms", lambda sizes, *_: ms[sizes])

    def product(sizes):
        M, K, N = sizes
        return Product(*map(jnp.ones, ((1, M, K), (1, K, N), (1, M, N))), sizes)

    for order in (up, up, down), (down, up, up):
        (layer,) = choose_from(
            {"mlp": list(map(product, order))}, candidates=["block"]
        ).layers
        assert layer.sizes == (up, up, down)
        assert (3 * layer.float_ms, 3 * layer.candidates[0].ms) == (8.0, 6.0)
    report = ChoiceReport((layer,), 0.03, "a device", float_ms=10.0)
    assert report.predicted_ms == 10.0 - (8.0 - 6.0)
    assert f"2 x {TOKENS}, 128, 256; {TOKENS}, 256, 128" in str(report)
    saved = (2 * WIDTH + 2 * WIDTH) * TOKENS / 2**20
    assert f"{saved:.1f} MiB" in str(report)


def test_a_layer_that_leaves_its_budget_is_named(planted, chosen):
    _, variables, x = planted
    changed = jax.tree.map(jnp.copy, variables)
    gain = changed["params"]["block_4"]["gain"]
    changed["params"]["block_4"]["gain"] = gain.at[7].set(300.0)
    report = chosen[1]
    with pytest.warns(
        UserWarning, match="'block_4/dense' has left its budget.*'block'"
    ):
        now = report.check(changed, x)
    assert now.rules["block_4/dense"] == recipes.row_block_lhs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.check(variables, x) == report
        assert now.check(changed, x) == now


def test_a_second_look_traces_nothing(planted, chosen, monkeypatch):
    _, variables, x = planted
    monkeypatch.delattr(Recorder, "multiply")
    assert chosen[1].check(variables, 2 * x) != chosen[1]


def test_recorded_products():
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (TOKENS, WIDTH), (WIDTH, 2 * WIDTH), (TOKENS, 2 * WIDTH)
    x, w, dy = (jax.random.normal(*pair) for pair in zip(keys, sizes, strict=True))
    product = Product(x[None], w[None], dy[None], (TOKENS, WIDTH, 2 * WIDTH))
    report = choose_from({"head": [product, product]}, candidates=["block", "rowwise"])
    (layer,) = report.layers
    assert layer[:2] == ("head", ((TOKENS, WIDTH, 2 * WIDTH),) * 2)
    # Codes of 127 steps to a block's maximum, about 4 sigma: each operand has an error
    # of 4 / 127 / sqrt(12).
    assert layer.candidates[0].y == pytest.approx(2**0.5 * 4 / 127 / 12**0.5, rel=0.1)


def test_a_layer_with_nan_has_no_candidate(planted, chosen):
    _, variables, x = planted
    diverged = x.at[0, 0].set(jnp.nan)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        now = chosen[1].check(variables, diverged)
    assert len(found) == DEPTH
    assert "has an error of nan" in str(found[0].message)
    assert "or their gradients, are not finite" in str(found[0].message)
    assert now.layers[0].chosen is None


@pytest.fixture
def dense():
    """A layer whose name is no pattern, its variables, and 2000 tokens."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="w+1")(x)

    x = jax.random.normal(jax.random.key(0), (2, 1000, 16))
    return Layer(), Layer().init(jax.random.key(1), x), x


def test_no_token_with_an_outlier_is_missed(dense):
    model, variables, x = dense
    options = {"loss": mean_square, "candidates": ["block"]}
    _, report = fbq_jax.choose_recipes(model, variables, x, **options)
    with pytest.warns(UserWarning, match="left its budget"):
        now = report.check(variables, x.at[1, 990, 3].set(1000.0))
    assert now.layers[0].largest > 50
    changed = x.at[0, 700, 3].set(jnp.nan)
    with pytest.raises(ValueError, match=r"are finite; those of w\+1 are not"):
        fbq_jax.choose_recipes(model, variables, changed, **options)


def test_a_loss_of_the_last_tokens_has_gradients(dense):
    model, variables, x = dense
    options = {"loss": lambda y: mean_square(y[:, 700:]), "candidates": ["block"]}
    _, report = fbq_jax.choose_recipes(model, variables, x, **options)
    assert min(report.layers[0].candidates[0][1:4]) > 0


def test_rules_are_patterns(dense):
    model, variables, x = dense
    rules, _ = fbq_jax.choose_recipes(model, variables, x, loss=mean_square)
    _, report = fbq_jax.quantize(model, rules, jax.random.key(0), x)
    assert len(report.products) == 1


@pytest.mark.filterwarnings("ignore:.*run as jax.numpy code")
def test_times_of_layers(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(choosing, "_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "milliseconds", lambda step: len(step()))
    choosing._compile({((32, 16, 48), "float32")}, ("block", "fallback"))
    found = choosing.layer_ms((32, 16, 48), "float32", ("block", "fallback"))
    assert found == dict.fromkeys(("float", "block", "fallback"), 3 / choosing._CALLS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ["blok"]}, "a list of names, some of fallback,.*'blok'"),
        ({"candidates": "block"}, "candidates takes a list of names; got 'block'"),
        ({"budget": 0}, "budget takes a finite number above 0; got 0"),
        ({"loss": lambda _: jnp.float32(0.0)}, "no product with a gradient"),
        ({"loss": lambda y: y[0]}, r"loss returns a scalar; got the shape \(128,\)"),
    ],
)
def test_errors(planted, options, message):
    model, variables, x = planted
    with pytest.raises(ValueError, match=message):
        fbq_jax.choose_recipes(model, variables, x, **{"loss": mean_square, **options})


def test_parameters_without_their_collection_are_an_error(planted):
    model, variables, x = planted
    with pytest.raises(ValueError, match=r"{'params': ...}.*; got the collections"):
        fbq_jax.choose_recipes(model, variables["params"], x, loss=mean_square)
