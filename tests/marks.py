"""Which cases of a test are fast."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_first_fast(values: Iterable[Any]) -> list[Any]:
    """The values of a parameter, of which all but the first are exhaustive."""
    first, *others = values
    return [first, *exhaustive(others)]


def exhaustive(values: Iterable[Any]) -> list[Any]:
    """The values of a parameter, all of them exhaustive."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
