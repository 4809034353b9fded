"""Fills the pages of the experiments with tables and pictures from the JSON results.

A page is prose with a place for each table, `<!-- name -->` to `<!-- end -->`.
"""

import os
from collections.abc import Callable
from pathlib import Path

from examples.llama import atomic
from examples.llama.experiments import run_tables, study_tables
from examples.llama.experiments.markdown import fill as fill_places
from examples.llama.experiments.markdown import places as names_of_places
from examples.llama.experiments.result_files import ResultsError

NOT_RUN = "*Not run yet.*"

# The tables by name, in the order of the page.
TABLES: dict[str, Callable[[Path], str]] = {
    "corpus": run_tables.corpus,
    "parity": run_tables.parity,
    "paired": run_tables.paired,
    "pairs": run_tables.pairs,
    "cost": run_tables.cost,
    "planted": run_tables.planted,
    "outliers": run_tables.outliers,
    "error": study_tables.errors,
    "criteria": study_tables.output_distances,
    "operands": study_tables.operands,
    "passes": study_tables.passes,
    "nonlinear": study_tables.nonlinear,
    "perplexity": study_tables.perplexity,
    "recipes": study_tables.by_recipe,
    "blocks": study_tables.blocks,
    "thresholds": run_tables.thresholds,
    "start": study_tables.start,
    "longer": run_tables.longer,
    "killed": run_tables.killed,
}


def places(page: Path) -> list[str]:
    """Returns the names of the places on a page; all if it does not exist."""
    return names_of_places(page.read_text()) if page.exists() else list(TABLES)


def fill(page: Path, results: Path) -> None:
    """Writes all tables into the page, each with the picture of its name if it exists.

    A page that does not exist is created, with tables and pictures only.

    Raises:
        ResultsError: The page has a place for an unknown table.
    """

    def place(name: str) -> str:
        if name not in TABLES:
            raise ResultsError(
                f"{page} has a place for {name}; there are {', '.join(TABLES)}"
            )
        content = TABLES[name](results) or NOT_RUN
        if (results / f"{name}.png").exists():
            folder = os.path.relpath(results, page.parent)
            content += f"\n\n![{name}]({folder}/{name}.png)"
        return content

    text = page.read_text() if page.exists() else _empty()
    page.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(page, fill_places(text, place))


def _empty() -> str:
    """A page with a place for each table and no prose."""
    places = (f"## {name}\n\n<!-- {name} -->\n\n<!-- end -->\n" for name in TABLES)
    return "# Experiments\n\n" + "\n".join(places)
