"""Which numbers settings accept that programs compute with in float32 or int32."""

import numbers
from typing import TypeGuard

import numpy as np

INT32 = np.iinfo(np.int32)
# As Python's numbers, which compare with integers of any size.
_SMALLEST, _LARGEST = (
    float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_positive_float32(value: object) -> TypeGuard[float]:
    """Whether a value is a number above 0 that float32 holds with all of its digits."""
    return is_number(value) and _SMALLEST <= value <= _LARGEST


def is_positive_int32(value: object) -> TypeGuard[int]:
    """Whether a value is an int from 1 to the largest of int32; a bool is none."""
    return type(value) is int and 1 <= value <= INT32.max
