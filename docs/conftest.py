"""The pages about other libraries run where these are installed."""

import importlib.util
from pathlib import Path

import pytest

MIGRATE = Path(__file__).parent / "migrate"
# These pages compile other libraries' programs, too.
NEEDS = {"aqt.md": "aqt", "qwix.md": "qwix", "fp8.md": "flax"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the pages of ``migrate``, whose libraries are as strict as they are."""
    for item in items:
        if item.path.parent != MIGRATE:
            continue
        library = NEEDS[item.path.name]
        missing = importlib.util.find_spec(library) is None
        item.add_marker(pytest.mark.skipif(missing, reason=f"needs {library}"))
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def other_libraries(request: pytest.FixtureRequest):
    """Lets other libraries promote types and ranks."""
    if request.path.parent != MIGRATE:
        yield
        return
    import jax

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
