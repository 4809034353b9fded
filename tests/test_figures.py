"""The tables in the documents are those of the committed measurements."""

from pathlib import Path

import pytest

from fbq_jax.bench import report, results

ROOT = Path(__file__).parent.parent
SECTIONS = results.load(ROOT / "fbq_jax/bench/results/nvidia-h200.json")
DOCUMENTS = {"recipes": "RECIPES.md", "profile": "PROFILE.md"}


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_show_the_committed_results(section):
    document = ROOT / DOCUMENTS.get(section, "README.md")
    assert report.markdown({section: SECTIONS[section]}) in document.read_text()
