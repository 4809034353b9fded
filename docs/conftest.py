"""The pages about other libraries run where these are installed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).parent
# By page: the libraries whose programs it runs.
OTHERS = {
    DOCS / "guides/whole-models.md": ("qwix",),
}
# The longest of the others, whose functions have fast tests of their own.
LONGEST = {
    DOCS / "guides/experts.md",
    DOCS / "guides/fp8.md",
    DOCS / "guides/memory.md",
    DOCS / "guides/serving.md",
    DOCS / "guides/several-devices.md",
    DOCS / "guides/training-loop.md",
    DOCS / "methods/fallback.md",
    DOCS / "methods/recipes.md",
    DOCS / "numerics.md",
    DOCS / "quickstart.md",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks these pages; other libraries warn of what they call themselves."""
    for item in items:
        if item.path in LONGEST:
            item.add_marker(pytest.mark.exhaustive)
        if item.path not in OTHERS:
            continue
        missing = [x for x in OTHERS[item.path] if importlib.util.find_spec(x) is None]
        reason = f"needs {', '.join(missing)}"
        item.add_marker(pytest.mark.skipif(bool(missing), reason=reason))
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets other libraries promote dtypes and ranks."""
    if request.path in OTHERS:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    else:
        yield
