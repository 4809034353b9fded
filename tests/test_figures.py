"""Tables and pictures of the documents, and maps, are of committed measurements."""

import itertools
import re
from pathlib import Path

import pytest

from docs import figures
from experiments import markdown
from experiments import page as evidence
from fbq_jax.bench import map as bench_map
from fbq_jax.bench import results
from fbq_jax.choice import choosing
from fbq_jax.kernels import speed_map

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", figures.PAGES)
def test_tables_are_those_of_the_committed_results(page):
    """``python -m docs.figures`` fills the pages."""
    assert figures.filled(page) == (ROOT / page).read_text()


def test_the_candidates_are_those_that_choose_recipes_compares():
    assert tuple(figures.CANDIDATES) == choosing.CANDIDATES


def test_every_table_has_a_place():
    pages = [(ROOT / page).read_text() for page in figures.PAGES]
    named = [markdown.places(text) for text in pages]
    assert all(named)
    assert sorted(itertools.chain(*named)) == sorted(figures.tables())


def test_every_picture_is_drawn_from_the_committed_results():
    shown = {
        (file.parent / picture).resolve()
        for file in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", file.read_text())
    }
    of_experiments = {
        evidence.RESULTS / f"{place}.png"
        for page in evidence.PAGES
        for place in markdown.places(page.read_text())
        if place.rpartition("/")[2] in evidence.PICTURES
    }
    assert shown == {*figures.PICTURES, *of_experiments}
    assert all(picture.is_file() for picture in shown)


@pytest.mark.parametrize("file", figures.PICTURES, ids=lambda file: file.stem)
def test_pictures_are_drawn(file):
    axes = figures.PICTURES[file]().axes
    assert axes
    assert all(axis.has_data() for axis in axes)


def test_small_layers_are_as_slow_as_the_pages_say():
    rows = [row for row in figures.SECTIONS["map"]["rows"] if row.what != "bf16"]
    assert max(row.ratio for row in rows if row.shape[0] == 512) < 1.0
    wide = [row for row in rows if row.shape[0] >= 8192 and min(row.shape[1:]) >= 2048]
    assert min(row.ratio for row in wide) > 1.0


@pytest.mark.parametrize("file", sorted(speed_map.DIRECTORY.glob("*.json")), ids=str)
def test_shipped_maps_are_the_committed_results(file):
    section = results.load(ROOT / "fbq_jax/bench/results" / file.name)["map"]
    assert speed_map.load(section["device"]) == bench_map.speed_map_of(section)
