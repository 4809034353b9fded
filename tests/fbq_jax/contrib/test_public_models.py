"""Public models as their packages ship them: ``pip install -e '.[models]'``.

Models whose package is not installed are skipped.
"""

import functools
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fbq_jax
from examples.quickstart import qwen3 as tutorial
from fbq_jax import RulesReport, assert_live, recipes
from fbq_jax.contrib import qwix
from tests.fbq_jax.contrib import public_models
from tests.fbq_jax.contrib.public_models import (
    MASK,
    MODELS,
    POSITIONS,
    TOKENS,
    PublicModel,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's code

ROWS = json.loads(public_models.ROWS.read_text())
# Heads that a model's code applies to the weight of the embedding.  They are in the
# report by their own paths, and the embedding is in float there.
TIED_HEADS = {"BERT, `nn.remat`": {"cls/predictions/decoder"}, "GPT-2": {"lm_head"}}


@pytest.fixture(autouse=True)
def _usual_settings() -> Iterator[None]:
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        public_models.one_device(),
    ):
        yield


def installed(name: str) -> PublicModel:
    model = MODELS[name]
    if not model.is_installed():
        pytest.skip(f"{model.package} is not installed, or has no such model")
    return model


def matrices_of(params: Any, stacks: tuple[str, ...]) -> set[str]:
    """The paths of parameters with two or more dimensions, in one layer of a stack."""
    found = set()
    for keys, leaf in jax.tree.leaves_with_path(params):
        path = "/".join(str(key.key) for key in keys if hasattr(key, "key"))
        if leaf.ndim >= 2 + path.startswith(stacks or "no stack"):
            found.add(path)
    return found


def check_report(
    report: RulesReport,
    products: int,
    matrices: set[str],
    floats: set[str],
    heads: set[str],
) -> None:
    """Each matrix is in the report; in float are those that no layer's op reads."""
    assert len(report.products) == products
    quantized = {p.parameter for p in report.products}
    assert quantized - matrices == heads
    quantized -= heads
    in_float = {p.parameter for p in report.float_parameters}
    assert quantized | in_float == matrices
    assert not quantized & in_float
    assert in_float == floats
    assert report.unused_rules == report.unmatched_layers == ()


def check_frozen(public: PublicModel, model: Any, state: Any) -> None:
    """The frozen model computes what the trained one does.

    What is in float may differ in its last bit, as in any two programs.
    """
    args, kwargs = public.args, public.kwargs
    if isinstance(model, nnx.Module):
        nnx.update(model, nnx.State(state))
        model.eval()
        frozen = fbq_jax.nnx.freeze(model, *args, **kwargs)
        serve = nnx.jit(lambda model: model(*args, **kwargs))
        outputs = serve(frozen), serve(model)
    else:
        frozen = fbq_jax.freeze(model, state, *args, **kwargs)
        apply = jax.jit(lambda variables: model.apply(variables, *args, **kwargs))
        outputs = apply(frozen), apply(state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), *outputs)


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_trains_quantized(name: str) -> None:
    public, products = installed(name), ROWS[name]["products"]
    model = public.build()
    expected, (variables, *_) = public.train(model)
    is_nnx = isinstance(model, nnx.Module)
    params = nnx.state(model, nnx.Param) if is_nnx else variables["params"]
    matrices = matrices_of(params, public.stacks)
    quantized, report = public.quantize(model)
    floats = {row["parameter"] for row in ROWS[name]["in_float"]}
    check_report(report, products, matrices, floats, TIED_HEADS.get(name, set()))
    losses, history = public.train(quantized)
    rtol = 0.04 if name.startswith("CLIP") else 0.01  # its logits are large
    np.testing.assert_allclose(losses, expected, rtol=rtol, atol=1e-4)
    if is_nnx:
        graphdef = nnx.graphdef(quantized)
        stats = [fbq_jax.nnx.fallback_stats(nnx.merge(graphdef, s)) for s in history]
    else:
        jax.tree.map(np.testing.assert_array_equal, params, history[0]["params"])
        stats = [fbq_jax.fallback_stats(variables) for variables in history]
    assert len(stats[0]) == products
    assert_live(stats[0], stats[1])
    assert_live(stats[1], stats[2])
    # CLIP's code reads the shardings of kernels.  A layer of Qwen that multiplied zeros
    # only has no threshold yet, which freeze refuses.
    has_thresholds = all(bool(jnp.all(s.theta > 0)) for s in stats[2].values())
    if has_thresholds and not name.startswith("CLIP"):
        check_frozen(public, quantized, {**history[0], **history[2]})


def test_rows_are_written_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "GPT-2"
    monkeypatch.setattr(public_models, "MODELS", {name: installed(name)})
    path = tmp_path / "models.json"
    path.write_text(json.dumps({**ROWS, name: {}}))
    public_models.write_rows(path)
    rows = json.loads(path.read_text())
    row, committed = rows[name], ROWS[name]
    for key in ("losses_in_float", "losses"):
        np.testing.assert_allclose(row[key], committed[key], rtol=1e-3)
    for key in ("package", "api", "function", "products", "in_float"):
        assert row[key] == committed[key]
    assert row["qwix"]["products"] == committed["qwix"]["products"]
    assert rows == {**ROWS, name: row}


def test_the_tutorial_trains_in_int8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("Qwen 3, `nnx.remat`")
    monkeypatch.setattr(tutorial, "HELD_OUT", tutorial.BATCH)
    outputs = []
    for options in ([], ["--float"]):
        tutorial.main(["--steps", "10", *options])
        outputs.append(capsys.readouterr().out)
    int8, in_float = outputs
    assert len(re.findall(r" fallback$", int8, re.MULTILINE)) == 14
    assert re.search(r"^lm_head/w .* float: rule 'lm_head'$", int8, re.MULTILINE)
    rates = [int(rate) for rate in re.findall(r"fallback rate (\d+)%", int8)]
    assert len(rates) == 2
    assert min(rates) > 0
    assert "fallback" not in in_float
    losses = [
        [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
        for output in outputs
    ]
    assert len(losses[0]) == 3  # of the first step, the last one, and held-out text
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.05)
    assert losses[0][2] < losses[0][0] - 0.5


def test_the_tutorials_thresholds_move_in_training_only() -> None:
    installed("Qwen 3, `nnx.remat`")
    windows = tutorial.load_text()[1][: tutorial.BATCH]
    model, _ = qwix.quantize_nnx(
        tutorial.make_model(),
        tutorial.RULES,
        *tutorial.inputs(windows),
        quantize_rngs=nnx.Rngs(1),
    )
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    stats = [fbq_jax.nnx.fallback_stats(model)]
    for _ in range(2):
        tutorial.train_step(model, optimizer, windows)
        stats.append(fbq_jax.nnx.fallback_stats(model))
        assert_live(*stats[-2:])
        tutorial.evaluate(model, windows)
        jax.tree.map(
            np.testing.assert_array_equal, fbq_jax.nnx.fallback_stats(model), stats[-1]
        )


TUNIX = [name for name, model in MODELS.items() if model.package == "google-tunix"]
ARGS = (TOKENS, POSITIONS, None, MASK)
BATCH = {
    "input_tokens": TOKENS,
    "input_mask": jnp.ones_like(TOKENS),
    "positions": POSITIONS,
    "attention_mask": MASK,
}


def add_lora(model: Any) -> Any:
    google_qwix = importlib.import_module("qwix")
    provider = google_qwix.LoraProvider(module_path=".*proj", rank=4, alpha=8.0)
    return google_qwix.apply_lora_to_model(model, provider, *ARGS, rngs=nnx.Rngs(7))


def quantize_base(model: Any) -> Any:
    return qwix.quantize_nnx(
        model, {".*": recipes.block}, *ARGS, quantize_rngs=nnx.Rngs(5)
    )[0]


def freeze_base(model: Any) -> Any:
    return fbq_jax.nnx.freeze(model, *ARGS)


def fit(model: Any, path: Path) -> list[float]:
    """The training losses of Tunix's trainer, which also evaluates."""
    trainers = importlib.import_module("tunix.sft.peft_trainer")
    optax = importlib.import_module("optax")
    config = trainers.TrainingConfig(
        eval_every_n_steps=2, max_steps=4, checkpoint_root_directory=str(path)
    )
    trainer = trainers.PeftTrainer(model, optax.adam(3e-3), config)
    trainer = trainer.with_gen_model_input_fn(lambda batch: batch)
    trainer.eval_loss_fn = fbq_jax.nnx.evaluation()(trainer.eval_loss_fn)
    losses = []
    buffer = trainer._buffer_metrics

    def record(metrics: Any, loss: Any, step: int, **kwargs: Any) -> Any:
        if kwargs:  # an evaluation has none
            losses.append(float(loss))
        return buffer(metrics, loss=loss, step=step, **kwargs)

    trainer._buffer_metrics = record
    trainer.train([BATCH] * 4, [BATCH])
    return losses


CHANGES = {
    "LoRA, quantize": (add_lora, quantize_base),
    "quantize, LoRA": (quantize_base, add_lora),
    "quantize, freeze, LoRA": (quantize_base, freeze_base, add_lora),
}


@pytest.mark.parametrize("name", TUNIX)
def test_lora_by_tunixs_trainer(name: str, tmp_path: Path) -> None:
    expected = fit(add_lora(installed(name).build()), tmp_path / "float")
    assert expected[-1] < expected[0]
    for order, changes in CHANGES.items():
        model = installed(name).build()
        for change in changes:
            model = change(model)
        before = fbq_jax.nnx.fallback_stats(model)
        losses = fit(model, tmp_path / order)
        np.testing.assert_allclose(losses, expected, rtol=0.02)
        after = fbq_jax.nnx.fallback_stats(model)
        steps = 0 if freeze_base in changes else len(losses)
        assert len(after) == 15
        for layer, stats in after.items():
            assert int(stats.count) == int(before[layer].count) + steps, layer


@pytest.mark.parametrize("name", ["Llama", "ViT", "Qwen 3, `nnx.remat`"])
def test_a_recipe_is_chosen_for_each_layer(name: str) -> None:
    found = installed(name)
    model, call = found.build(), {"loss": found.loss, **found.kwargs}
    if isinstance(model, nnx.Module):
        call["quantize"] = qwix.quantize_nnx
        rules, report = fbq_jax.nnx.choose_recipes(model, *found.args, **call)
        _, used = qwix.quantize_nnx(model, rules, *found.args, **found.kwargs)
    else:
        key = jax.random.key(0)
        variables = model.init(key, *found.args, **found.kwargs)
        rules, report = fbq_jax.choose_recipes(model, variables, *found.args, **call)
        _, used = fbq_jax.quantize(model, rules, key, *found.args, **found.kwargs)
    assert len(report.layers) == len(rules) == len(used.products)
    assert not used.unused_rules
