"""Which cases of a test are fast."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_first_fast(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """The values of a parameter, of which all but the first ones are exhaustive."""
    values = list(values)
    others = [pytest.param(v, marks=pytest.mark.exhaustive) for v in values[fast:]]
    return values[:fast] + others
