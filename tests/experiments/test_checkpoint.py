"""The experiments on a model in Hugging Face's format, at sizes for a CPU."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import checkpoint, result_files
from experiments.studies.operands import operands
from fbq_jax import recipes
from tests.examples.make_hf_fixture import FIXTURE

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command on a small model and token ids; returns the rows."""
    monkeypatch.setattr(checkpoint, "_TOKENS", 17)
    for part in ("train.bin", "val.bin"):
        (np.arange(2000, dtype=np.uint16) % 47).tofile(tmp_path / part)
    out = tmp_path / "out.json"

    def run(command, *options):
        arguments = [command, str(FIXTURE / "llama"), str(tmp_path), f"--out={out}"]
        checkpoint.main([*arguments, *options])
        return result_files.read(out)["rows"]

    return run


def test_outliers(run):
    rows = run("outliers", "--sequences=2")
    assert {row["what"] for row in rows} == {"qkv", "out", "gate_up", "down"}
    assert all(row["largest"] > 1 for row in rows)


@pytest.mark.exhaustive
def test_losses(run, monkeypatch):
    monkeypatch.setattr(recipes, "NAMED", {"block": recipes.block})
    rows = run("losses", "--sequences=4")
    assert [row["what"] for row in rows] == ["bf16", "block", "chosen"]
    assert rows[0]["added"] == 0
    assert all(len(row["losses"]) == 2 for row in rows)
    assert 0 < abs(rows[1]["added"]) < 0.1


def test_schemes(run, monkeypatch):
    few = dict(list(checkpoint.second_terms.schemes().items())[:1])
    monkeypatch.setattr(checkpoint.second_terms, "schemes", lambda: few)
    _, row = run("schemes", "--sequences=4")
    assert 0 < abs(row["added"]) < 0.1


def test_planted_outliers_change_nothing():
    pairs = np.arange(68, dtype=np.int32).reshape(2, 2, 17) % 47
    subject = checkpoint.load(FIXTURE / "llama", pairs)
    config = dataclasses.replace(subject.config, dtype=jnp.float32)
    subject = dataclasses.replace(subject, config=config)
    planted = checkpoint.plant(subject, 606)
    assert planted.losses(None) == subject.losses(None)
    before, after = (
        np.asarray(operands(config, of.params, jnp.asarray(pairs[0]))["down"].x)
        for of in (subject, planted)
    )
    largest = abs(after).max(axis=(1, 2)) / np.sqrt((before**2).mean(axis=(1, 2)))
    assert largest == pytest.approx(606, rel=0.42)  # a power of two away at most


def test_outliers_are_planted_for_some_commands(run, monkeypatch, capsys):
    few = {"W": (None, checkpoint.second_terms.Operand(8, 128))}
    monkeypatch.setattr(checkpoint.second_terms, "schemes", lambda: few)
    before, after = (
        run("schemes", "--sequences=4", *options)
        for options in ((), ("--planted=6559",))
    )
    assert before[0]["losses"] == after[0]["losses"]
    assert abs(before[1]["added"]) < abs(after[1]["added"])
    with pytest.raises(SystemExit):
        run("exported", "--planted=6559")
    assert "--planted is an option of losses and schemes" in capsys.readouterr().err


def test_exports(run, monkeypatch):
    monkeypatch.setattr(checkpoint.hf, "FORMATS", ("hf",))
    bf16, exported = run("exported", "--sequences=4")
    assert bf16["losses"] == exported["losses"]  # exact, and the folder is read


@pytest.mark.exhaustive
def test_tuning(run, monkeypatch):
    sizes = {"seq": 16, "batch": 2, "steps": 2, "eval_every": 2}
    monkeypatch.setattr(checkpoint, "TUNING", checkpoint.TUNING | sizes)
    rows = run("tuned", "--seeds", "3", "--recipes", "bf16", "block")
    assert [(row["what"], row["seed"]) for row in rows] == [("bf16", 3), ("block", 3)]
    assert all(row["val_loss"]["2"] > 0 for row in rows)
