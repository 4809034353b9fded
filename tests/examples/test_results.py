"""The committed results of short runs on a CPU."""

import json
from pathlib import Path
from typing import Any

from examples.llama.config import RECIPES

ROOT = Path(__file__).parents[2]


def read(name: str) -> dict[str, Any]:
    file = ROOT / "examples" / "llama" / "results" / f"{name}.json"
    return dict(json.loads(file.read_text()))


def test_every_recipe_was_trained_with_the_same_options() -> None:
    compared, again = read("compare-cpu"), read("chance-cpu")
    assert set(RECIPES) <= set(compared["runs"])
    differ = {
        name
        for name, value in compared["options"].items()
        if again["options"][name] != value
    }
    assert differ == {"saved_bits"}
    assert compared["versions"] == again["versions"]
