"""Rollouts have the trainer's log-probabilities, and runs learn and are drawn."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from examples.grpo import __main__ as program
from examples.grpo import objective, plot, step, task
from examples.grpo.config import RECIPES, Config
from examples.grpo.rollout import sample
from examples.grpo.train import train
from examples.llama.errors import UserError
from tests.marks import rows_with_first_fast

pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZER = step.make_optimizer(0.01)
PROMPTS, SAMPLES = 6, 3


def trained(model):
    """A state whose logits are not small, as those of a new model are."""
    state = step.init(model, OPTIMIZER, jax.random.key(0))
    params = jax.tree.map(lambda p: 2 * p if p.ndim > 1 else p, state.params)
    return state._replace(params=params)


def roll_out(sampler, variables, seed=0):
    key = jax.random.key(seed)
    prompts = task.draw(key, PROMPTS)
    sizes = {"samples": SAMPLES, "length": task.ANSWER}
    return sample(sampler, step.freeze(sampler, variables), prompts, key, **sizes)


@pytest.mark.parametrize(
    ("recipe", "rollout", "exact"),
    rows_with_first_fast(
        [
            ("rowwise", "rowwise", True),
            ("row_block_lhs", "row_block_lhs", True),
            ("bf16", "rowwise", False),
        ]
    ),
)
def test_ratios_before_the_first_update(recipe, rollout, exact):
    config = Config(recipe=recipe, rollout=rollout)
    assert config.invariant == exact
    trainer, sampler = config.models()
    state = trained(trainer)
    variables = state.variables()
    if not exact:
        new = step.init(sampler, OPTIMIZER, jax.random.key(0))
        variables["fallback"] = new.fallback
    found = roll_out(sampler, variables)
    gain = jnp.linspace(-1.0, 1.0, PROMPTS * SAMPLES)
    before = (trainer, OPTIMIZER, state, found, gain, 0.2)
    state, measured = step.update(*before)
    if exact:
        assert measured["max_log_ratio"] == measured["mean_log_ratio"] == 0
        np.testing.assert_allclose(measured["loss"], -gain.mean(), atol=1e-6)
        assert measured["clipped"] == 0
    else:
        assert measured["max_log_ratio"] > 1e-3
    _, measured = step.update(trainer, OPTIMIZER, state, found, gain, 0.2)
    assert measured["max_log_ratio"] > measured["mean_log_ratio"] > 0


def test_the_samples_of_a_prompt_are_together_and_differ():
    model = Config(recipe="bf16").models()[0]
    variables = trained(model).variables()
    found = roll_out(model, variables)
    assert found.tokens.shape == (PROMPTS * SAMPLES, task.PROMPT + task.ANSWER)
    prompts = task.draw(jax.random.key(0), PROMPTS)
    expected = jnp.repeat(prompts, SAMPLES, axis=0)
    np.testing.assert_array_equal(found.tokens[:, : task.PROMPT], expected)
    assert len(np.unique(found.tokens[:, task.PROMPT :], axis=0)) > SAMPLES
    assert (found.log_probabilities < 0).all()
    again, other = roll_out(model, variables), roll_out(model, variables, seed=1)
    np.testing.assert_array_equal(again.tokens, found.tokens)
    assert (other.tokens != found.tokens).any()


@pytest.mark.exhaustive
def test_rewards_rise_with_the_likelihood_of_rewarded_answers():
    """Updates make the answers of positive advantages more likely."""
    model = Config(recipe="bf16").models()[0]
    state = trained(model)
    found = roll_out(model, state.variables())
    rewards = (found.tokens[:, -1] < 5).astype(jnp.float32).reshape(-1, SAMPLES)
    gain = objective.advantages(rewards).ravel()
    assert (gain != 0).any()
    losses = []
    for _ in range(10):
        state, measured = step.update(model, OPTIMIZER, state, found, gain, 0.2)
        losses.append(measured["loss"])
    assert losses[-1] < losses[0] - 0.02
    assert measured["clipped"] > 0


SHORT = ["--steps", "2", "--prompts", "4", "--samples", "2", "--warmup", "0.001"]


@pytest.mark.exhaustive
def test_a_run_leaves_metrics_and_a_picture(tmp_path, capsys):
    runs = [tmp_path / f"{seed}" for seed in (0, 1)]
    for seed, out in enumerate(runs):
        options = ["--recipe", "bf16", *SHORT, "--seed", f"{seed}", "--out", str(out)]
        assert program.main(options) == 0
    assert "largest |log ratio|" in capsys.readouterr().out
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines()
    first, *steps = map(json.loads, lines)
    assert first["warmup_steps"] >= 1
    assert [record["step"] for record in steps] == [1, 2]
    names = {"reward", "max_log_ratio", "mean_log_ratio", "clipped", "loss", "seconds"}
    assert steps[0].keys() == {"step", *names}
    out = tmp_path / "both.json"
    assert plot.main([*map(str, runs), "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["device"] == "cpu"
    (metrics,) = plot.by_label(results).values()
    assert [len(run["reward"]) for run in metrics] == [2, 2]
    assert metrics[0].keys() == names - {"seconds"}
    assert imread(out.with_suffix(".png")).std() > 0.01
    assert program.main(["--out", str(runs[0])]) == 1
    assert "already holds a run" in capsys.readouterr().err


def test_committed_runs_of_invariant_models_have_no_mismatch():
    results = json.loads((Path(plot.__file__).parent / "results/cpu.json").read_text())
    for run in results["runs"]:
        assert Config(**run["options"]).invariant == run["options"]["invariant"]
        mismatches = run["metrics"]["max_log_ratio"]
        assert len(mismatches) == Config.steps
        assert any(mismatches) != run["options"]["invariant"]
        rewards = run["metrics"]["reward"]
        assert sum(rewards[-10:]) > 2 * sum(rewards[:10])
    seeds = {label: len(runs) for label, runs in plot.by_label(results).items()}
    assert seeds == {
        "bf16": 3,
        "bf16, sampled by rowwise": 3,
        "rowwise, invariant": 3,
        "row_block_lhs, invariant": 3,
    }


@pytest.mark.exhaustive
def test_equal_seeds_give_equal_runs():
    config = Config(steps=2, prompts=4, samples=2, warmup=0.001)
    runs = [list(train(config)) for _ in range(2)]
    for record in (*runs[0], *runs[1]):
        record.pop("seconds")
    assert runs[0] == runs[1]
    assert all(record["max_log_ratio"] == 0 for record in runs[0][1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "int4"}, "recipe takes one of bf16, fallback, "),
        ({"rollout": "int4"}, "rollout takes one of bf16, .* or None, got 'int4'"),
        ({"clip": 0}, "clip takes a number from "),
        ({"warmup": 1.5}, "warmup takes a number from 0 to 1, got 1.5"),
        ({"samples": 0}, "samples takes an integer from 1 to "),
        ({"recipe": "block", "invariant": True}, "takes a batch-invariant recipe"),
        (
            {"rollout": "row_block_lhs", "invariant": True},
            "invariant takes one recipe for both models, got rowwise and row_block_lhs",
        ),
    ],
)
def test_options_that_are_not_accepted(options, message):
    with pytest.raises(UserError, match=message):
        Config(**options)


def test_an_invariant_model_is_the_default_of_the_recipes_that_have_one():
    names = {name for name in RECIPES if Config(recipe=name).invariant}
    rows = {"rowwise", "aqt_int8", "aqt_int8_local"}
    switchback = {"switchback", "switchback_m", "switchback_q"}
    row_blocks = {"row_block", "row_block_lhs", "fp8_row_block", "fp8_row_block_lhs"}
    assert names == rows | switchback | row_blocks
    assert not Config(recipe="rowwise", rollout="row_block_lhs").invariant
    assert not Config(invariant=False).invariant


def test_a_warm_up_that_does_not_succeed_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("examples.grpo.train._LONGEST", 1)
    out = str(tmp_path / "run")
    assert program.main(["--recipe", "bf16", "--warmup", "1", "--out", out]) == 1
    assert "after 1 steps on answers the model gives" in capsys.readouterr().err


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
