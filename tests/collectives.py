"""The collectives of a compiled program."""

import math
import re
from typing import Any, NamedTuple

_CALL = re.compile(
    r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
_TYPE = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array that a collective returns on each device."""

    kind: str
    dtype: str
    size: int
    bytes: int


def collectives(compiled: Any) -> list[Collective]:
    """The collectives of a compiled program, one for each array they return."""
    found = []
    for types, kind in _CALL.findall(compiled.as_text()):
        for dtype, bits, dims in _TYPE.findall(types):
            size = math.prod(int(dim) for dim in dims.split(",") if dim)
            found.append(Collective(kind, dtype, size, size * int(bits or 8) // 8))
    return found
