"""Tables in the documents, and maps, are those of the committed measurements."""

import json
from pathlib import Path

import pytest

from examples.llama.experiments import engines
from fbq_jax.bench import compiled, errors, models, report, results, tpu
from fbq_jax.bench import map as bench_map
from fbq_jax.kernels import speed_map

ROOT = Path(__file__).parent.parent
SECTIONS = results.load(ROOT / "fbq_jax/bench/results/nvidia-h200.json")
COMPILED = compiled.load(ROOT / "fbq_jax/bench/results/compiled.json")
DOCUMENTS = {
    "recipes": "RECIPES.md",
    "profile": "PROFILE.md",
    "map": "PROFILE.md",
    "kernels": "PROFILE.md",
    "products": "PROFILE.md",
}
RESULTS = "docs/performance/results.md"
# The rows of the README's table: what, and the section and shape that measure it.
SUMMARY = (
    ("training step of `nn.Dense`, 4096 to 4096 channels", "step", (8192, 4096, 4096)),
    ("training step of `nn.Dense`, 2048 to 2048", "step", (8192, 2048, 2048)),
    ("training step of `nn.Dense`, 4096 to 14336", "step", (8192, 4096, 14336)),
    ("Llama block of 8192 channels", "block", (8192, 28672, 16384)),
    ("Llama block of 4096 channels", "block", (4096, 14336, 16384)),
    ("Llama block of 2048 channels", "block", (2048, 5632, 16384)),
    ("optimizer step of a Llama, 4 layers of 4096", "train", (4096, 14336, 4, 8)),
    ("optimizer step of a Llama, 22 layers of 2048", "train", (2048, 5632, 22, 8)),
)


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_show_the_committed_results(section):
    document = ROOT / DOCUMENTS.get(section, RESULTS)
    assert report.markdown({section: SECTIONS[section]}) in document.read_text()


def test_the_readme_sums_up_the_committed_results():
    lines = [
        "| | `fallback` | `block` | Flax's FP8 |",
        "| --- | --- | --- | --- |",
    ]
    for name, section, shape in SUMMARY:
        rows = [row for row in SECTIONS[section]["rows"] if row.shape == shape]
        ratios = {row.what: f"{row.ratio:.2f}" for row in rows}
        recipes = ("fallback", "block", "Flax Fp8DotGeneral")
        cells = [ratios.get(recipe, "") for recipe in recipes]
        lines.append(f"| {' | '.join([name, *cells])} |")
    assert "\n".join(lines) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", sorted(speed_map.DIRECTORY.glob("*.json")), ids=str)
def test_shipped_maps_are_the_committed_results(file):
    section = results.load(ROOT / "fbq_jax/bench/results" / file.name)["map"]
    assert speed_map.load(section["device"]) == bench_map.speed_map_of(section)


@pytest.mark.parametrize("part", ["kernels", "products", "layers"])
def test_tables_show_the_committed_kernels(part):
    document = ROOT / DOCUMENTS.get(part, RESULTS)
    assert compiled.tables(COMPILED)[part] in document.read_text()


def test_the_table_shows_the_committed_layers_on_tpus():
    content = tpu.load(ROOT / "fbq_jax/bench/results/compiled-tpu.json")
    assert tpu.markdown(content) in (ROOT / "PROFILE.md").read_text()


def test_the_table_shows_the_committed_arithmetic_of_engines():
    content = json.loads(engines.RESULTS.read_text())
    page = ROOT / "examples/llama/EXPERIMENTS.md"
    assert engines.markdown(content) in page.read_text()


def test_the_table_shows_the_committed_public_models():
    content = models.load(ROOT / "fbq_jax/bench/results/models.json")
    assert models.markdown(content) in (ROOT / "MODELS.md").read_text()


def test_the_table_shows_the_committed_errors():
    content = errors.load(ROOT / "fbq_jax/bench/results/errors-cpu.json")
    assert errors.markdown(content) in (ROOT / "RECIPES.md").read_text()


def test_committed_kernels_do_not_spill():
    assert not [row for row in COMPILED["kernels"] if row["spills"]]
    assert not [row for row in COMPILED["products"] if row["loop"]["spills"]]
