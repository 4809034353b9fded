"""The errors of recipes as outliers grow, and what they recommend a recipe for."""

from pathlib import Path

import pytest

from fbq_jax.bench import errors
from fbq_jax.bench.__main__ import main

RESULTS = Path(errors.__file__).parent / "results/errors-cpu.json"


def test_the_recommended_recipe_keeps_its_promises():
    """The committed errors of the recipe that the page of errors recommends."""
    found = {
        row["data"]: row["errors"]
        for row in errors.load(RESULTS)["recipe_errors"]
        if row["what"] == "row_block_lhs"
    }
    assert found["up to 606"]["dw_in"] < 0.04
    assert found["up to 6559"]["dw_in"] < 0.05
    assert found["606, 1/2 of blocks"]["y_token"] < 0.05
    assert found["606, 1/2 of blocks"]["dw_in"] < 0.05


def test_the_file_has_every_recipe_on_every_operand():
    rows = errors.load(RESULTS)["recipe_errors"]
    names = errors.names()
    data = [row["data"] for row in rows[: len(rows) // len(names)]]
    assert [(row["what"], row["data"]) for row in rows] == [
        (name, where) for name in names for where in data
    ]


@pytest.mark.exhaustive
def test_the_command_writes_what_table_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(errors, "SHAPE", (256, 256, 128))
    path = tmp_path / "errors.json"
    assert main(["errors", "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["table", str(path)]) == 0
    table = capsys.readouterr().out
    assert all(f"| {name} |" in table for name in errors.names())
