"""Draws the pictures of the experiments from the JSON results."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.llama.experiments import result_files, run_pictures, study_pictures
from examples.llama.experiments.result_files import Json
from examples.llama.plot import save


def draw(results: Path, names: Collection[str]) -> list[str]:
    """Draws the pictures of these names whose results exist; returns their names."""
    drawn = []
    for name, (read, make) in PICTURES.items():
        if name in names and (data := read(results)):
            save(make(data), results / f"{name}.png")
            drawn.append(name)
    return drawn


def _study(name: str) -> Callable[[Path], Json]:
    return lambda results: result_files.study(results, name)


def _runs(stage: str) -> Callable[[Path], Json]:
    return lambda results: result_files.runs(results, stage)


def _runs_with_fallback(results: Path) -> Json:
    runs = result_files.runs(results, "parity")
    return runs if "fallback-0" in runs else {}


# By name: the function that reads the results, empty if there are none, and the
# function that draws them.
PICTURES: dict[str, tuple[Callable[[Path], Json], Callable[[Any], Figure]]] = {
    "parity": (_runs("parity"), run_pictures.parity),
    "cost": (_runs("parity"), run_pictures.cost),
    "thresholds": (_runs_with_fallback, run_pictures.thresholds),
    "outliers": (_runs("outliers"), run_pictures.outliers),
    "error": (_study("error"), study_pictures.errors),
    "criteria": (_study("criteria"), study_pictures.output_distances),
    "operands": (_study("operands"), study_pictures.operands),
    "passes": (_study("passes"), study_pictures.passes),
    "nonlinear": (_study("nonlinear"), study_pictures.nonlinear),
    "perplexity": (_study("perplexity"), study_pictures.perplexity),
    "blocks": (_study("blocks"), study_pictures.blocks),
    "start": (_study("start"), study_pictures.start),
    "longer": (_runs("longer"), run_pictures.longer),
}
