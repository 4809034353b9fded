"""The tables of training runs in the documents match the committed results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.llama.config import RECIPES
from examples.llama.experiments import result_files, run_tables

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "examples" / "llama" / "experiments" / "results"


def read(name: str) -> dict[str, Any]:
    file = ROOT / "examples" / "llama" / "results" / f"{name}.json"
    return dict(json.loads(file.read_text()))


def row(name: str, run: dict[str, float], bf16: dict[str, float]) -> str:
    losses = f"{run['loss']:.3f} | {run['val_loss']:.3f}"
    return f"| {name} | {losses} | {run['val_loss'] / bf16['val_loss'] - 1:+.2%} |"


def rows() -> Iterator[str]:
    """Yields the rows of the table in RECIPES.md."""
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
    assert f"| --- |\n{table}\n\n" in (ROOT / "RECIPES.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for text in rows():
        start = text.rsplit(" | ", 1)[0] + " |"
        named = text.startswith(("| bf16 |", "| block |", "| fallback |"))
        assert (f"\n{start}\n" in readme) == named


def test_the_readme_has_losses_and_costs_of_the_experiments() -> None:
    runs = result_files.runs(EXPERIMENTS, "parity")
    names = {"bf16-0": "bf16", "bf16-1": "bf16, another seed"}
    base = result_files.last_val_loss(runs["bf16-0"])
    expected = []
    for name, run in runs.items():
        loss = result_files.last_val_loss(run)
        to_bf16 = "" if name == "bf16-0" else f" {loss / base - 1:+.2%}"
        expected.append(
            f"| {names.get(name, name.removesuffix('-0'))} | {loss:.4f} |{to_bf16} | "
            f"{run['tokens_per_s']:,.0f} | {run['peak_bytes'] / 1e9:.1f} |"
        )
    rows = rows_of_the_readme("| validation loss | to bf16 | tokens/s | peak GB |")
    assert len(rows) == 7
    assert set(rows) <= set(expected)


def test_the_readme_has_what_outliers_cost() -> None:
    rows = rows_of_the_readme("| recipe | 58 | 606 | 6559 |")
    assert len(rows) == 6
    # The first column of the page is the model without outliers, for bf16 only.
    of_page = run_tables.outliers(EXPERIMENTS).splitlines()
    assert {row.replace(" | ", " |  | ", 1) for row in rows} <= set(of_page)


def rows_of_the_readme(head: str) -> list[str]:
    _, table = (ROOT / "README.md").read_text().split(f"{head}\n")
    return table.partition("\n\n")[0].splitlines()[1:]
