"""The table of kernel configurations that were found fastest, by measuring.

A file ``tables/<device kind>.json`` holds, for an op and a bucket of sizes, the options
of a kernel's ``Config``.  A shape's bucket is each of its sizes rounded to a power of
two.  A kernel asks here first, and else goes by a rule of its own: so what runs depends
on nothing but the device, the shape and this file, and is the same every time.

``python -m fbq_jax.tune`` measures, and writes entries.
"""

import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

DIRECTORY = Path(__file__).parent / "tables"


def path(device_kind: str) -> Path:
    """The file of a kind of device."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return DIRECTORY / f"{slug}.json"


def bucket(sizes: Sequence[int]) -> str:
    """The name of a shape's bucket.

    >>> bucket((8192, 5000, 14336))
    '8192x4096x16384'
    """
    return "x".join(str(2 ** round(math.log2(max(size, 1)))) for size in sizes)


def lookup(op: str, sizes: Sequence[int]) -> dict[str, Any] | None:
    """The options of an op's kernel for a shape on this process's device, if known."""
    entries = _entries(jax.devices()[0].device_kind)
    return entries.get(op, {}).get(bucket(sizes))


@functools.cache
def _entries(device_kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    file = path(device_kind)
    return json.loads(file.read_text())["entries"] if file.exists() else {}
