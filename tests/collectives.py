"""The collectives of a compiled program."""

import math
import re
from typing import Any, NamedTuple

_CALL = re.compile(
    r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TYPE = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array that a collective returns on each device."""

    kind: str
    dtype: str
    size: int
    bytes: int


def collectives(compiled: Any) -> list[Collective]:
    """The collectives of a compiled program, one for each array they return.

    On TPUs, an asynchronous collective is in several fusions, and counts once.
    """
    found, fused, in_fusion = [], set(), False
    for line in compiled.as_text().splitlines():
        if not line.startswith(" "):  # the head of a computation
            in_fusion = "fus" in line.partition("(")[0]
        if (call := _CALL.search(line)) is None:
            continue
        types, kind = call.groups()
        if in_fusion:
            key = kind, types.partition("{")[0], _CHANNEL.findall(line)[0]
            if key in fused:
                continue
            fused.add(key)
        for dtype, bits, dims in _TYPE.findall(types):
            size = math.prod(int(dim) for dim in dims.split(",") if dim)
            found.append(Collective(kind, dtype, size, size * int(bits or 8) // 8))
    return found
