"""Checks the fields of a frozen dataclass against their annotations.

Values come from JSON files and command lines, where a type checker sees nothing.
"""

import dataclasses
import reprlib
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin
from typing import get_type_hints as type_hints

import numpy as np


class Range(NamedTuple):
    """The numbers of a type that a field accepts."""

    of: type
    low: float
    high: float


# JAX's integers have 32 bits. Positive numbers keep all of their digits in float32.
SMALLEST, LARGEST = (float(x) for x in (np.finfo("f4").tiny, np.finfo("f4").max))
Size = Annotated[int, Range(int, 1, 2**31 - 1)]
Natural = Annotated[int, Range(int, 0, 2**31 - 1)]
Seed = Annotated[int, Range(int, 0, 2**32 - 1)]
Positive = Annotated[float, Range(float, SMALLEST, LARGEST)]
FromZero = Annotated[float, Range(float, 0, LARGEST)]
FromOne = Annotated[float, Range(float, 1, LARGEST)]

_NAMES = {int: "an integer", float: "a number", bool: "a bool", str: "text"}
_NAMES |= {NoneType: "None"}


def check(instance: Any) -> None:
    """Checks all fields of a dataclass that do not have their default value.

    A float field also accepts integers, which become floats. An integer field accepts
    no bool. The message of a ValueError names the field and what it accepts.
    """
    for name, kinds in kinds_of(type(instance)).items():
        value = getattr(instance, name)
        if value is getattr(type(instance), name, dataclasses.MISSING):  # its default
            continue
        if not any(_is_a(value, kind) for kind in kinds):
            accepted = " or ".join(map(_describe, kinds))
            raise ValueError(f"{name} takes {accepted}, got {reprlib.repr(value)}")
        if len(kinds) == 1 and getattr(kinds[0], "of", None) is float:
            object.__setattr__(instance, name, float(value))


def check_divides(instance: Any, name: str, other: str) -> None:
    """Raises ValueError if an integer field does not divide another one."""
    divisor, number = getattr(instance, name), getattr(instance, other)
    if number % divisor:
        raise ValueError(f"{name} takes a divisor of {other} ({number}), got {divisor}")


def kinds_of(cls: type) -> dict[str, list[Any]]:
    """Returns what each field of a dataclass accepts: types, ranges and literals."""
    hints = type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        is_union = get_origin(hint) in (Union, UnionType)
        members = get_args(hint) if is_union else (hint,)
        found[field.name] = [getattr(m, "__metadata__", (m,))[0] for m in members]
    return found


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(kind, Range):
        return _is_a(value, kind.of) and kind.low <= value <= kind.high
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return isinstance(value, tuple) and all(_is_a(x, item) for x in value)
    if get_origin(kind) is Literal:
        return any(type(value) is type(x) and value == x for x in get_args(kind))
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    return isinstance(value, int | float if kind is float else kind)


def _describe(kind: Any) -> str:
    if isinstance(kind, Range):
        digits = "g" if kind.of is float else ""
        return f"{_NAMES[kind.of]} from {kind.low:{digits}} to {kind.high:{digits}}"
    if get_origin(kind) is Literal:
        *several, last = map(str, get_args(kind))
        return f"one of {', '.join(several)}, {last}" if several else last
    if get_origin(kind) is tuple:
        return "a tuple of integers"
    return _NAMES.get(kind) or str(kind.__name__)
