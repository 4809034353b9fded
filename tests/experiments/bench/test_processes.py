"""The benchmarks that measure in processes of their own."""

import dataclasses

import pytest

from experiments.bench import first_calls, pretraining
from experiments.settings import TOY

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize("recipe", first_calls.RECIPES)
def test_a_first_call(monkeypatch, recipe):
    monkeypatch.setattr(first_calls, "SHAPE", (256, 128, 128))
    assert first_calls.first_call(recipe, 2) > 0


def test_a_pretraining(monkeypatch, tmp_path):
    sizes = TOY.pretrain | {"seq": 32, "batch": 2}
    monkeypatch.setattr(pretraining, "SEEDS", dataclasses.replace(TOY, pretrain=sizes))
    steps = {"steps": 2, "log_every": 1, "eval_every": 2}
    monkeypatch.setattr(pretraining, "_STEPS", steps)
    figures = pretraining.measure("bf16, 10 bits", tmp_path)
    assert figures["what"] == "bf16, 10 bits"
    assert figures["steps"] == 2
    assert figures["options"]["saved_bits"] == 10
    assert figures["tokens_per_s"] > 0
