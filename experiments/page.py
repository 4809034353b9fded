"""Fills the pages of the evidence with tables and pictures from the JSON results.

A page is prose with places, `<!-- size/name -->` to `<!-- end -->`, each for what the
results of a size show of a name: its table, then its picture.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from examples.llama import atomic
from examples.llama.plot import save
from experiments import markdown, model_tables, pictures, tables
from experiments.result_files import ResultsError
from experiments.studies import CURVES

RESULTS = Path(__file__).parent / "results"
_EVIDENCE = Path(__file__).parents[1] / "docs/evidence"
PAGES = tuple(
    _EVIDENCE / f"{name}.md" for name in ("experiments", "models", "training")
)
# The page with all tables of other results, in their folder.
OTHER_PAGE = "tables.md"
NOT_RUN = "*Not run yet.*"

TABLES: dict[str, Callable[[Path], str]] = {
    "parity": tables.parity,
    "paired": tables.paired,
    "outliers": tables.outliers,
    "recipes": tables.by_recipe,
    "blocks": tables.blocks,
    "longer": tables.longer,
    "killed": tables.killed,
}
# Of results that other commands than ``python -m experiments`` write.
MODEL_TABLES: dict[str, Callable[[Path], str]] = {
    "added-losses": model_tables.added_losses,
    "schemes": model_tables.schemes,
    "steps": model_tables.steps,
    "experts": partial(model_tables.steps, files=("qwen3-30b-a3b",)),
    "devices": model_tables.devices,
    "parts": model_tables.parts,
    "parts-by-devices": model_tables.parts_by_devices,
    "planted": model_tables.planted,
    "predictions": model_tables.predictions,
    "pretraining": model_tables.pretraining,
}
PICTURES: dict[str, Callable[[Path], Figure | None]] = {
    "losses": pictures.losses,
    "outliers-by-layer": pictures.outliers_by_layer,
    "outliers": pictures.outliers,
    **{name: partial(pictures.curves, name=name) for name in CURVES},
    "thresholds": pictures.thresholds,
    "longer": pictures.longer,
}
NAMES = tuple(dict.fromkeys([*TABLES, *PICTURES]))


def draw(results: Path | None = None) -> list[str]:
    """Draws pictures and fills the pages of the evidence, or one in another folder.

    Returns:
        The names of the pictures.

    Raises:
        ResultsError: There is no such folder, a page has a place for an unknown name,
            or the results do not belong together.
    """
    if results is None:
        pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
        root = RESULTS
    elif results.is_dir():
        places = (f"## {n}\n\n<!-- {n} -->\n\n<!-- end -->\n" for n in NAMES)
        pages = {results / OTHER_PAGE: "# Experiments\n\n" + "\n".join(places)}
        root = results
    else:
        raise ResultsError(f"there is no folder {results} with results to draw")
    drawn = []
    for page, text in pages.items():
        for place in markdown.places(text):
            folder, name = _parts(page, root, place)
            if name in PICTURES and (figure := PICTURES[name](folder)) is not None:
                save(figure, folder / f"{name}.png")
                drawn.append(place)
        atomic.write(page, fill(page, text, root))
    return drawn


def fill(page: Path, text: str, root: Path = RESULTS) -> str:
    """Returns the text of a page with its places filled; raises as `draw` does."""

    def content(place: str) -> str:
        folder, name = _parts(page, root, place)
        parts = [of[name](folder) for of in (TABLES, MODEL_TABLES) if name in of]
        if name in PICTURES and (file := folder / f"{name}.png").exists():
            parts.append(f"![{name}]({os.path.relpath(file, page.parent)})")
        return "\n\n".join(filter(None, parts)) or NOT_RUN

    return markdown.fill(text, content)


def _parts(page: Path, root: Path, place: str) -> tuple[Path, str]:
    """The folder of the results of a place, and the name of what it shows."""
    size, _, name = place.rpartition("/")
    if name not in (known := (*NAMES, *MODEL_TABLES)):
        raise ResultsError(
            f"{page} has a place for {name}; there are {', '.join(known)}"
        )
    return root / size, name
