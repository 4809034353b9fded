"""Which cases of a test are fast."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_first_fast(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """The values of a parameter, of which all but the first ones are exhaustive."""
    values = list(values)
    others = [pytest.param(v, marks=pytest.mark.exhaustive) for v in values[fast:]]
    return values[:fast] + others


def slow(values: Iterable[Any], which: Collection[Any]) -> list[Any]:
    """The values of a parameter, of which some are exhaustive."""
    mark = pytest.mark.exhaustive
    return [pytest.param(v, marks=mark) if v in which else v for v in values]


def rows_with_first_fast(rows: Iterable[tuple[Any, ...]], fast: int = 1) -> list[Any]:
    """The same for rows, which hold a value of each of several parameters."""
    rows = list(rows)
    others = [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows[fast:]]
    return rows[:fast] + others
