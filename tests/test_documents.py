"""The documents name every public function, and their links lead to files."""

import ast
import re
from pathlib import Path

import pytest

from fbq_jax import recipes
from fbq_jax.recipes import presets

ROOT = Path(__file__).parents[1]
API = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.rst"))
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if "_build" not in path.parts
)


def public_names(package):
    """The names that a package exports, by ``from x import name as name``."""
    tree = ast.parse((ROOT / "fbq_jax" / package / "__init__.py").read_text())
    return [
        ".".join(filter(None, ("fbq_jax", package, alias.name)))
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


@pytest.mark.parametrize("package", ["", "nnx"])
def test_the_api_reference_has_every_public_name(package):
    def is_there(name):
        short = name.rpartition(".")[2]
        # Instances such as fallback_dot are named in the text of their page.
        pattern = rf":: ({re.escape(name)}|fbq_jax\.{short})$|``{short}``"
        return re.search(pattern, API, re.MULTILINE)

    missing = {name for name in public_names(package) if not is_there(name)}
    # These packages have a page each.
    assert missing <= {"fbq_jax.linen", "fbq_jax.nnx", "fbq_jax.recipes"}


@pytest.mark.parametrize("name", recipes.NAMED)
def test_the_api_reference_describes_every_recipe(name):
    """It has the comments in front of them."""
    assert ":: fbq_jax.recipes.presets\n   :members:" in API
    source = Path(presets.__file__).read_text()
    assert re.search(rf"^#: .*\n{name} = ", source, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
