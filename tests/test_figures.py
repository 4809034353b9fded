"""Tables and pictures of the documents, and maps, are of committed measurements."""

import json
import re
from pathlib import Path

import pytest

from docs import figures
from examples.llama.experiments import __main__ as experiments
from examples.llama.experiments import engines, page, pictures
from fbq_jax.bench import compiled, errors, models, report, results, tpu
from fbq_jax.bench import map as bench_map
from fbq_jax.kernels import speed_map

ROOT = Path(__file__).parent.parent
SECTIONS = results.load(ROOT / "fbq_jax/bench/results/nvidia-h200.json")
COMPILED = compiled.load(ROOT / "fbq_jax/bench/results/compiled.json")
PERFORMANCE = ROOT / "docs/performance"
# The pages of sections that are not on results.md.
PAGES = {
    "recipes": "errors.md",
    "profile": "profile.md",
    "map": "map.md",
    "grouped": "experts.md",
    "moe": "experts.md",
    "moe_scaling": "experts.md",
    "serve": "frozen-layers.md",
    "kernels": "kernels.md",
    "products": "kernels.md",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_show_the_committed_results(section):
    page = PERFORMANCE / PAGES.get(section, "results.md")
    assert report.markdown({section: SECTIONS[section]}) in page.read_text()


@pytest.mark.parametrize("page", figures.TABLES)
def test_summaries_are_those_of_the_committed_results(page):
    """``python -m docs.figures`` fills the pages."""
    text = (ROOT / page).read_text()
    assert figures.filled(page) == text
    names = re.findall("<!-- (\\w+) -->\n\n\\|", text)
    assert names == [function.__name__ for function in figures.TABLES[page]]


def test_every_picture_is_drawn_from_the_committed_results():
    shown = {
        (page.parent / picture).resolve()
        for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())
    }
    of_experiments = {
        folder / f"{name}.png"
        for folder, described in experiments.PAGES.items()
        for name in page.places(described)
        if name in pictures.PICTURES
    }
    assert shown == {*figures.PICTURES, *of_experiments}
    assert all(picture.is_file() for picture in shown)


@pytest.mark.parametrize("file", figures.PICTURES, ids=lambda file: file.stem)
def test_pictures_are_drawn(file):
    axes = figures.PICTURES[file]().axes
    assert axes
    assert all(axis.has_data() for axis in axes)


def test_small_layers_are_as_slow_as_the_pages_say():
    rows = [row for row in SECTIONS["map"]["rows"] if row.what != "bf16"]
    assert max(row.ratio for row in rows if row.shape[0] == 512) < 1.0
    wide = [row for row in rows if row.shape[0] >= 8192 and min(row.shape[1:]) >= 2048]
    assert min(row.ratio for row in wide) > 1.0


@pytest.mark.parametrize("file", sorted(speed_map.DIRECTORY.glob("*.json")), ids=str)
def test_shipped_maps_are_the_committed_results(file):
    section = results.load(ROOT / "fbq_jax/bench/results" / file.name)["map"]
    assert speed_map.load(section["device"]) == bench_map.speed_map_of(section)


@pytest.mark.parametrize("part", ["kernels", "products", "layers"])
def test_tables_show_the_committed_kernels(part):
    page = PERFORMANCE / PAGES.get(part, "results.md")
    assert compiled.tables(COMPILED)[part] in page.read_text()


def test_the_table_shows_the_committed_layers_on_tpus():
    content = tpu.load(ROOT / "fbq_jax/bench/results/compiled-tpu.json")
    assert tpu.markdown(content) in (PERFORMANCE / "tpus.md").read_text()


def test_the_table_shows_the_committed_arithmetic_of_engines():
    content = json.loads(engines.RESULTS.read_text())
    page = ROOT / "docs/evidence/experiments.md"
    assert engines.markdown(content) in page.read_text()


def test_the_table_shows_the_committed_public_models():
    content = models.load(ROOT / "fbq_jax/bench/results/models.json")
    page = ROOT / "docs/integrations/public-models.md"
    assert models.markdown(content) in page.read_text()


def test_the_table_shows_the_committed_errors():
    content = errors.load(ROOT / "fbq_jax/bench/results/errors-cpu.json")
    assert errors.markdown(content) in (PERFORMANCE / "errors.md").read_text()


def test_committed_kernels_do_not_spill():
    assert not [row for row in COMPILED["kernels"] if row["spills"]]
    assert not [row for row in COMPILED["products"] if row["loop"]["spills"]]
