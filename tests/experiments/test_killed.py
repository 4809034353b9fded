"""The experiment that kills a run and resumes it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import killed
from experiments.settings import TOY, Experiment


@pytest.mark.exhaustive
def test_a_killed_run_ends_as_the_whole_one(tmp_path: Path) -> None:
    sizes = {"hidden": 16, "ffn": 32, "layers": 1, "seq": 16}
    settings = dataclasses.replace(TOY, pretrain=TOY.pretrain | sizes)
    experiment = Experiment(settings, tmp_path, tmp_path)
    text = experiment.text("python")
    text.mkdir(parents=True)
    for part in "train", "val":
        (np.arange(2000, dtype=np.uint16) % 50).tofile(text / f"{part}.bin")
    killed.run(experiment)
    found = json.loads((tmp_path / "killed.json").read_text())
    assert 3 < found["killed_at"] <= 8
    assert found["arrays"] > 10
    assert found["arrays_that_differ"] == []
    assert found["losses_equal"]
