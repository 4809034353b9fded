"""Checks the fields of a frozen dataclass against their annotations.

Values come from JSON files and command lines, where a type checker sees nothing.
"""

import argparse
import dataclasses
import reprlib
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin
from typing import get_type_hints as type_hints

import numpy as np

from examples.llama.errors import UserError


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
_NAMES |= {NoneType: "None", dict: "an object"}


def option(default: Any, meaning: str) -> Any:
    """A field of a dataclass that `add_options` makes a flag of."""
    return dataclasses.field(default=default, metadata={"help": meaning})


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """Adds a flag for each `option`; one that is not given sets no attribute."""
    for field in dataclasses.fields(cls):
        kind = _kinds(type_hints(cls, include_extras=True)[field.name])[0]
        takes: dict[str, Any] = {"type": kind.of} if isinstance(kind, Range) else {}
        if kind is bool:
            takes = {"action": argparse.BooleanOptionalAction}
        default = "" if field.default is None else f" (default: {field.default})"
        flag, text = field.name.replace("_", "-"), field.metadata["help"] + default
        parser.add_argument(f"--{flag}", default=argparse.SUPPRESS, help=text, **takes)


def given(asked: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of `add_options` that the command line gives."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(asked).items() if name in names}


def check(instance: Any) -> None:
    """Checks all fields of a dataclass that do not have their default value.

    Integers in float fields become floats. A UserError names the field.
    """
    for name, hint in type_hints(type(instance), include_extras=True).items():
        value = getattr(instance, name)
        if value is not getattr(type(instance), name, dataclasses.MISSING):
            object.__setattr__(instance, name, check_value(name, value, hint))


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Returns a value that an annotation accepts; others raise UserError."""
    kinds = _kinds(hint)
    if not any(_is_a(value, kind) for kind in kinds):
        accepted = " or ".join(map(_describe, kinds))
        raise UserError(f"{name} takes {accepted}, got {reprlib.repr(value)}")
    is_float = len(kinds) == 1 and getattr(kinds[0], "of", None) is float
    return float(value) if is_float else value


def check_divides(instance: Any, name: str, other: str) -> None:
    """Raises UserError if an integer field does not divide another one."""
    divisor, number = getattr(instance, name), getattr(instance, other)
    if number % divisor:
        raise UserError(f"{name} takes a divisor of {other} ({number}), got {divisor}")


def _kinds(hint: Any) -> list[Any]:
    """What an annotation accepts: types, ranges and literals."""
    is_union = get_origin(hint) in (Union, UnionType)
    members = get_args(hint) if is_union else (hint,)
    return [getattr(member, "__metadata__", (member,))[0] for member in members]


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
