"""Checks the values of a frozen dataclass against the types of its fields.

Values come from JSON files and from callers, where a type checker sees nothing.
"""

import dataclasses
import math
import reprlib
from types import NoneType
from typing import Any, get_args, get_type_hints

_NAMES: dict[Any, str] = {
    bool: "a bool",
    int: "an integer",
    float: "a finite number",
    str: "text",
    NoneType: "None",
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
        kinds = get_args(hint) or (hint,)
        if value is not field.default and not any(_is_a(value, kind) for kind in kinds):
            accepted = " or ".join(_NAMES.get(kind, kind.__name__) for kind in kinds)
            got = reprlib.repr(value)
            raise ValueError(f"{field.name} takes {accepted}, got {got}")
        if hint is float:
            object.__setattr__(instance, field.name, float(value))


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
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
