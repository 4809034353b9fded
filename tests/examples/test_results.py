"""The tables of training runs in the documents match the committed results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.llama.config import RECIPES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "recipes-on-a-cpu.md"


def read(name: str) -> dict[str, Any]:
    file = ROOT / "examples" / "llama" / "results" / f"{name}.json"
    return dict(json.loads(file.read_text()))


def row(name: str, run: dict[str, float], bf16: dict[str, float]) -> str:
    losses = f"{run['loss']:.3f} | {run['val_loss']:.3f}"
    return f"| {name} | {losses} | {run['val_loss'] / bf16['val_loss'] - 1:+.2%} |"


def rows() -> Iterator[str]:
    """Yields the rows of the table on the page."""
    runs = read("compare-cpu")["runs"]
    for name, run in runs.items():
        yield row(name, run, runs["bf16"])
    for name, run in read("chance-cpu")["runs"].items():
        bits = name.removeprefix("bf16-")
        yield row(f"bf16, `--saved-bits {bits}`", run, runs["bf16"])


def test_every_recipe_was_trained_with_the_same_options() -> None:
    compared, again = read("compare-cpu"), read("chance-cpu")
    assert list(compared["runs"]) == list(RECIPES)
    differ = {
        name
        for name, value in compared["options"].items()
        if again["options"][name] != value
    }
    assert differ == {"saved_bits"}
    assert compared["versions"] == again["versions"]


def test_tables_match_the_results() -> None:
    table = "\n".join(rows())
    assert f"| --- |\n{table}\n\n" in PAGE.read_text()
