"""Where INT8 is faster than bf16: measured speedups of layers, by GPU and shape.

A file ``speed_maps/<device kind>.json`` holds how many times as fast as bf16 a linear
layer from K to N trains on M tokens, for recipes by name.  The map depends on nothing
but the file, so the prediction for a shape is the same in every run.

``python -m fbq_jax.bench map`` measures a map and writes the file.
"""

import bisect
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fbq_jax.kernels import tuning_table

DIRECTORY = Path(__file__).parent / "speed_maps"

Sizes = tuple[int, int, int]


def path(device_kind: str) -> Path:
    """The file for a kind of device, such as ``"NVIDIA H200"``."""
    return DIRECTORY / tuning_table.path(device_kind).name


@dataclasses.dataclass(frozen=True)
class SpeedMap:
    """The measured speedups of one kind of device.

    Layers from K to N and from N to K are measured together, so K is at most N.  Large
    shapes may be missing.

    Attributes:
      device: the kind of device.
      backend: what computed the GEMMs, as in ``fbq_jax.ops.dispatch.Choice``.
      speedups: for each recipe by name, the speedup over bf16 of each ``(M, K, N)``;
        all recipes have the same shapes.
    """

    device: str
    backend: str
    speedups: Mapping[str, Mapping[Sizes, float]]

    def predict(self, recipe: str, sizes: Sizes) -> float:
        """The speedup of a layer over bf16, interpolated between measured shapes.

        Logarithms of speedups are interpolated linearly in the logarithms of M, K and
        N, so a prediction lies between the speedups of the shapes around it.  Sizes
        beyond the measured range count as its ends.  A missing shape has the highest
        speedup of the measured shapes that it contains: INT8 mostly gains with size.

        Args:
          recipe: the name of a measured recipe.
          sizes: M, K and N, at least 1.
        """
        measured = self.speedups[recipe]
        tokens = sorted({M for M, _, _ in measured})
        widths = sorted({width for _, *widths in measured for width in widths})
        M, *channels = sizes
        corners = itertools.product(
            _around(M, tokens), *(_around(size, widths) for size in channels)
        )
        log = 0.0
        for (M0, M_share), (K0, K_share), (N0, N_share) in corners:
            shape = M0, min(K0, N0), max(K0, N0)
            speedup = _measured_inside(measured, shape)
            log += M_share * K_share * N_share * math.log(speedup)
        return math.exp(log)


def load(device_kind: str) -> SpeedMap | None:
    """The map of a kind of device; None if there is none."""
    return _load(path(device_kind))


def save(file: Path, speed_map: SpeedMap) -> None:
    """Writes a map, atomically.

    Raises:
      ValueError: the map lacks its smallest shape, or recipes differ in their shapes.
    """
    shapes = {frozenset(measured) for measured in speed_map.speedups.values()}
    if len(shapes) != 1 or not _has_smallest(next(iter(shapes))):
        raise ValueError(
            "a speed map takes recipes with the same shapes, which include the "
            "smallest M with the smallest K and N"
        )
    content = dataclasses.asdict(speed_map) | {
        "speedups": {
            recipe: {_name(sizes): measured[sizes] for sizes in sorted(measured)}
            for recipe, measured in speed_map.speedups.items()
        }
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    _load.cache_clear()


@functools.cache
def _load(file: Path) -> SpeedMap | None:
    if not file.exists():
        return None
    content = json.loads(file.read_bytes())
    speedups = {
        recipe: {_sizes(name): speedup for name, speedup in measured.items()}
        for recipe, measured in content["speedups"].items()
    }
    return SpeedMap(content["device"], content["backend"], speedups)


def _around(size: int, ticks: Sequence[int]) -> list[tuple[int, float]]:
    """The ticks around a size, with their shares in the logarithm of the size."""
    size = min(max(size, ticks[0]), ticks[-1])
    after = bisect.bisect_left(ticks, size)
    if ticks[after] == size:
        return [(size, 1.0)]
    low, high = ticks[after - 1], ticks[after]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


def _measured_inside(measured: Mapping[Sizes, float], sizes: Sizes) -> float:
    """The speedup of a shape, or the highest of the measured ones that it contains."""
    if sizes in measured:
        return measured[sizes]
    return max(
        speedup
        for shape, speedup in measured.items()
        if all(size <= limit for size, limit in zip(shape, sizes, strict=True))
    )


def _has_smallest(shapes: frozenset[Sizes]) -> bool:
    width = min((K for _, K, _ in shapes), default=0)
    return (min((M for M, _, _ in shapes), default=0), width, width) in shapes


def _name(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def _sizes(name: str) -> Sizes:
    M, K, N = map(int, name.split("x"))
    return M, K, N
