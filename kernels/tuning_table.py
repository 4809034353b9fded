"""The table of the fastest measured kernel configurations.

A file ``tables/<device kind>.json`` holds the options of a kernel's ``Config`` for each
op and each bucket of sizes.  The bucket of a shape rounds each size to a power of two.
A kernel looks here first, and uses a rule for shapes without an entry.  So the choice
depends only on the device, the shape and the table, and is the same in every run.

``python -m fbq_jax.tune`` measures configurations and writes entries.
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
    """The file for a kind of device, such as ``"NVIDIA H200"``."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return DIRECTORY / f"{slug}.json"


def bucket(sizes: Sequence[int]) -> str:
    """The name of a shape's bucket.

    >>> bucket((8192, 5000, 14336))
    '8192x4096x16384'
    """
    return "x".join(str(2 ** round(math.log2(max(size, 1)))) for size in sizes)


def lookup(op: str, sizes: Sequence[int]) -> dict[str, Any] | None:
    """The options for an op and a shape on the first device; None without an entry."""
    entries = _entries(jax.devices()[0].device_kind)
    return entries.get(op, {}).get(bucket(sizes))


@functools.cache
def _entries(device_kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    file = path(device_kind)
    return json.loads(file.read_bytes())["entries"] if file.exists() else {}
