"""`--recipe auto`, and rules for the layers of a Llama."""

import functools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from examples.llama import build, choosing, mesh, metrics, train
from examples.llama.config import Config, read_recipe
from examples.llama.errors import UserError
from examples.llama.model import Llama
from fbq_jax import FallbackDot, GatedMLP, NormDense, recipes
from fbq_jax.choice import ChoiceReport
from tests.examples.small import small_config

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOKENS = jnp.arange(32).reshape(2, 16)
PATHS = {
    "layers/attention/qkv/dense",
    "layers/attention/out",
    "layers/mlp/gate_up",
    "layers/mlp/down",
}


def outputs(dot_general):
    model = Llama(small_config(saved_bits=10), dot_general)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    apply = functools.partial(model.apply, mutable=["fallback"])
    return variables, jax.jit(apply)(variables, TOKENS)


def test_one_rule_for_all_layers_is_the_recipe():
    """Norms, gates and projections run fused, too."""
    rules, recipe = read_recipe(".*=fallback"), FallbackDot(recipes.fallback)
    jax.tree.map(np.testing.assert_array_equal, outputs(rules), outputs(recipe))


@pytest.fixture
def running():
    """The types of the modules that run in a test."""
    found = set()

    def intercept(method, args, kwargs, context):
        found.add(type(context.module))
        return method(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield found


def test_layers_of_a_gated_mlp_run_fused_by_two_recipes(running):
    outputs(read_recipe(".*/down=row_block_lhs,.*=block"))
    assert {GatedMLP, NormDense} <= running


def test_recipes_are_timed_in_the_fused_layers_that_train(running, monkeypatch):
    def chosen(model, *_, quantize, **__):
        return None, quantize(model, {"layers.*": recipes.block})[0]

    monkeypatch.setattr(choosing, "choose_recipes", chosen)
    model = build.with_recipe(Config(recipe="auto"), small_config())
    timed = choosing.choose(model, {}, TOKENS)
    jax.eval_shape(timed.init, jax.random.key(0), TOKENS)
    assert {GatedMLP, NormDense} <= running


def test_rules_give_each_layer_its_recipe():
    text = ".*/down=row_block_lhs,.*/qkv/.*=bf16,.*=fallback"
    variables, _ = jax.eval_shape(lambda: outputs(read_recipe(text)))
    states = variables["fallback"]["layers"]
    # The state of a recipe without fallback has no threshold to move.
    rates = {
        "/".join(key.key for key in path[:-2])
        for path, _ in jax.tree.leaves_with_path(states)
    }
    assert rates == {"attention/out", "mlp/gate_up", "mlp/down"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "blok"}, "recipe takes one of bf16, .*auto, or rules.*'blok'"),
        ({"recipe": "a=blok"}, "a rule of recipe takes PATTERN=RECIPE.*'a=blok'"),
        ({"recipe": "=block"}, "a rule of recipe takes.*'=block'"),
        ({"recipe": "[=block"}, r"recipe: the rule '\[' is not a regular expression"),
        ({"recipe": "mlp=block"}, "a rule of recipe matches one of layers.*'mlp'"),
        ({"recipe": "auto", "experts": 2}, "auto measures no experts"),
        ({"recipe": ".*=rowwise", "reduce": "int32"}, "INT8 recipes only, got"),
        ({"recipe": "auto", "invariant": True}, "takes a batch-invariant recipe"),
    ],
)
def test_errors(options, message):
    with pytest.raises(UserError, match=message):
        Config(**options)


def test_auto_takes_one_device(monkeypatch):
    monkeypatch.setattr(mesh, "size", lambda: 2)
    with pytest.raises(UserError, match="auto takes one device"):
        choosing.choose(Llama(small_config()), {}, TOKENS)


def test_the_rules_of_a_report_name_what_differs():
    def receipt(layer, chosen):
        return types.SimpleNamespace(layer=layer, chosen=chosen)

    def rules(*layers):
        report = types.SimpleNamespace(layers=[receipt(*layer) for layer in layers])
        return choosing.with_rules(Config(recipe="auto"), report).recipe

    out, down, gate_up = "layers/attention/out", "layers/mlp/down", "layers/mlp/gate_up"
    assert rules((out, "block"), (down, "block")) == "block"
    assert rules((out, None), (down, None)) == "bf16"
    found = rules((out, "block"), (down, None), (gate_up, "block"))
    assert found == "layers/mlp/down=bf16,.*=block"


@pytest.fixture(scope="module")
def folder(text, tmp_path_factory):
    """A run of two steps."""
    out = tmp_path_factory.mktemp("runs") / "auto"
    sizes = {"hidden": 32, "ffn": 64, "layers": 2, "heads": 2, "seq": 16, "batch": 4}
    every = {"save_every": 1, "eval_every": 2, "check_every": 1}
    config = Config(**sizes, **every, data=str(text), steps=2, recipe="auto")
    train.train(config, out)
    return out


def test_a_run_keeps_its_receipt(folder):
    report = ChoiceReport.load(folder / "recipes.json")
    assert {layer.layer for layer in report.layers} == PATHS
    assert (folder / "recipes.png").read_bytes()[1:4] == b"PNG"
    options = json.loads((folder / "config.json").read_text())
    assert (
        options["recipe"] == choosing.with_rules(Config(recipe="auto"), report).recipe
    )
    assert options["recipe"] == "block"
    assert build.load(folder).weights == "INT8 codes (block)"


@pytest.mark.exhaustive
def test_a_resumed_run_looks_again(folder, tmp_path, capsys):
    run = tmp_path / "auto"
    shutil.copytree(folder, run)
    report = json.loads((run / "recipes.json").read_text())
    (run / "recipes.json").write_text(json.dumps(report | {"budget": 1e-4}))
    for later in (run / "checkpoints").iterdir():
        if later.name.endswith("2"):
            shutil.rmtree(later)
    assert train.main(["--recipe=auto", "--resume", f"--out={run}"]) == 0
    output = "".join(capsys.readouterr())
    assert output.count("has left its budget: 'block'") == len(PATHS)
    before, after = (metrics.read(x / "metrics.jsonl") for x in (folder, run))
    assert [record["loss"] for record in after] == [record["loss"] for record in before]


def test_a_run_on_several_devices_goes_on_without_a_look(folder, monkeypatch, capsys):
    monkeypatch.setattr(mesh, "size", lambda: 2)
    assert choosing.resume(folder, Llama(small_config()), {}, TOKENS) is None
    assert "no look is taken" in capsys.readouterr().out


def test_a_damaged_receipt_is_named(folder, tmp_path):
    run = tmp_path / "auto"
    shutil.copytree(folder, run)
    (run / "recipes.json").write_text("{}")
    with pytest.raises(UserError, match=r"recipes\.json holds no report"):
        choosing.resume(run, Llama(small_config()), {}, TOKENS)
