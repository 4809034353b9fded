"""Which cases of a test are fast."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def with_first_fast(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """The values of a parameter, of which all but the first ones are exhaustive."""
    values = list(values)
    others = [pytest.param(v, marks=pytest.mark.exhaustive) for v in values[fast:]]
    return values[:fast] + others


def rows_with_first_fast(rows: Iterable[tuple[Any, ...]], fast: int = 1) -> list[Any]:
    """The same for rows, which hold a value of each of several parameters."""
    rows = list(rows)
    others = [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows[fast:]]
    return rows[:fast] + others


def pairs_with_first_fast(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """All pairs, of which those with neither parameter's first value are exhaustive."""
    one, other = list(one), list(other)
    return [
        pytest.param(
            *pair,
            marks=[pytest.mark.exhaustive]
            * (pair[0] is not one[0] and pair[1] is not other[0]),
        )
        for pair in itertools.product(one, other)
    ]
