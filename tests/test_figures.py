"""The tables in the documents are those of the committed measurements."""

from pathlib import Path

import pytest

from fbq_jax.bench import report, results

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "fbq_jax/bench/results/nvidia-h200.json"
ELSEWHERE = {"recipes": "RECIPES.md", "profile": "PROFILE.md"}


@pytest.mark.parametrize("section", results.load(MEASURED))
def test_tables_are_the_measured_ones(section):
    document = ROOT / ELSEWHERE.get(section, "README.md")
    sections = results.load(MEASURED)
    assert report.markdown({section: sections[section]}) in document.read_text()
