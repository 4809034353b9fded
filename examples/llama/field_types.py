"""Checks the values of a frozen dataclass against the types and ranges of its fields.

Values come from JSON files and from callers, where a type checker sees nothing.
"""

import dataclasses
import math
import reprlib
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

# The positive numbers that float32 holds with all of its digits.
SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)

_NAMES: dict[Any, str] = {
    bool: "a bool",
    int: "an integer",
    float: "a finite number",
    str: "text",
    NoneType: "None",
    tuple[int, ...]: "a tuple of integers",
}


def check(instance: Any) -> None:
    """Checks all fields of a dataclass.

    A float field accepts finite integers, which become floats. An integer field accepts
    no bool. A field that has its default value is not checked.

    Raises:
        ValueError: A value has another type. The message names the field and what it
            accepts.
    """
    hints = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value, hint = getattr(instance, field.name), hints[field.name]
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if value is not field.default and not any(_is_a(value, kind) for kind in kinds):
            accepted = " or ".join(_NAMES.get(kind, kind.__name__) for kind in kinds)
            got = reprlib.repr(value)
            raise ValueError(f"{field.name} takes {accepted}, got {got}")
        if hint is float and value is not field.default:
            object.__setattr__(instance, field.name, float(value))


def check_sizes(instance: Any, *names: str) -> None:
    """Raises ValueError if one of these fields is not a positive 31-bit integer."""
    for name in names:
        if not 0 < (value := getattr(instance, name)) < 2**31:
            raise ValueError(f"{name} takes a positive integer of 31 bits, got {value}")


def check_at_least(instance: Any, lowest: float, *names: str) -> None:
    """Raises ValueError if one of these fields is below ``lowest`` or above float32."""
    for name in names:
        if not lowest <= (value := getattr(instance, name)) <= _LARGEST:
            raise ValueError(
                f"{name} takes a number of at least {lowest:g} and at most "
                f"{_LARGEST:g}, got {value:g}"
            )


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is tuple:
        of = get_args(kind)[0]
        return isinstance(value, tuple) and all(_is_a(item, of) for item in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and _is_finite(value)
    return isinstance(value, kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False
