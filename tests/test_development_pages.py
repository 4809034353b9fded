"""The pages for contributors name files, ops and targets of make that exist."""

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from fbq_jax.ops.dispatch import OPS
from tests.test_architecture import LEVELS, TOOLS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/develop").glob("*.md"))]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
FOLDERS = (
    *("fbq_jax", "kernels", "examples", "experiments", "tests", "docs", ".ci"),
    ".github",
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_targets_exist(page):
    # A path in backquotes from the root; "*" stands for several files.
    code = re.findall(r"`([\w./*-]+)`", page.read_text())
    paths = [c for c in code if c.startswith(tuple(f"{f}/" for f in FOLDERS))]
    # The site that make docs builds.
    missing = [p for p in paths if p != "docs/_build/html" and not list(ROOT.glob(p))]
    assert not missing
    named = re.findall(r"^make ([\w-]+)|`make ([\w-]+)", page.read_text(), re.MULTILINE)
    assert {target for pair in named for target in pair if target} <= set(TARGETS)


def texts(drawing, kind):
    """The texts of a class in a drawing, by their heights from the bottom."""
    tree = ElementTree.parse(ROOT / "docs/develop" / drawing)
    found = [t for t in tree.iter(f"{SVG}text") if t.get("class") == kind]
    heights = sorted({float(t.get("y")) for t in found}, reverse=True)
    return [{t.text for t in found if float(t.get("y")) == y} for y in heights]


def test_the_drawings_have_the_levels_of_packages_and_ops():
    assert texts("packages.svg", "package") == [*LEVELS, TOOLS]
    named = {text.split()[0] for row in texts("step.svg", "code") for text in row}
    assert {"matmul"} <= named <= set(OPS)


def test_the_workflow_runs_targets_of_make():
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split() for step in steps if "run" in step]
    assert all(make == "make" and target in TARGETS for make, target in commands)
    assert {"lint", "test", "docs", "package"} <= {target for _, target in commands}


def test_the_workflow_tests_the_declared_versions_of_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    declared = [c.removeprefix(prefix) for c in project["classifiers"] if prefix in c]
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == declared
    assert project["requires-python"] == f">={declared[0]}"
