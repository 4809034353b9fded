"""Where INT8 is faster than bf16: training steps of Flax layers, by their shapes."""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from fbq_jax.bench import layers, step
from fbq_jax.bench.compare import Comparison
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import ResultsError, Row
from fbq_jax.kernels import speed_map
from fbq_jax.kernels.speed_map import Sizes, SpeedMap

TOKENS = (512, 2048, 8192, 65536)
WIDTHS = (512, 1024, 2048, 4096, 8192, 28672)
# Larger products take most of the time to measure, and INT8 mostly gains with size.
_MAX_PRODUCT = 2**42
#: ``(M, K, N)`` of layers from K to N and back.
SHAPES = tuple(
    (M, K, N)
    for K, N in itertools.combinations_with_replacement(WIDTHS, 2)
    for M in TOKENS
    if M * K * N <= _MAX_PRODUCT
)
# With several small layers, the time of a call does not hide the time of the layers.
_DEPTH, _LARGE_DEPTH, _LARGE_PRODUCT = 8, 2, 2**36
_SETTLING_STEPS = 8  # until thresholds stay in their range
_LOSS_LIMIT = 0.2  # of the error, as in ``step``
_MEMORY_SHARE = 0.5  # of the GPU


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures steps of layers from K to N and back, for each ``(M, K, N)``.

    A step is the one of ``step.rows``, for bf16 and ``layers.RECIPES``.  Shapes that
    need more than half of the GPU's memory are left out, and named on stderr.
    """
    warm_up, samples = effort.warm_up_s / 5, max(1, effort.samples // 4)
    effort = Effort(warm_up, samples, effort.batch_s, rest_s=0.0, launches=2)
    stacks = {
        depth: [layers.bf16(depth), *layers.linen(depth, implementation)]
        for depth in (_DEPTH, _LARGE_DEPTH)
    }
    for shape in _that_fit(shapes):
        depth = _depth(shape)
        programs = step.compiled(stacks[depth], shape, depth)
        yield from Comparison(
            shape,
            step.work(shape, depth),
            step.inputs(shape),
            {"loss": _LOSS_LIMIT},
            _SETTLING_STEPS,
            results=lambda step: (step(),),
        ).rows(programs, effort)


def install(section: Mapping[str, Any]) -> str:
    """Makes a section the map that ``fbq_jax.dispatch`` reads; returns its file.

    Raises ResultsError for a quick run, or if the file cannot be written.
    """
    if section["quick"]:
        raise ResultsError("a map of a quick run is too coarse to be used")
    file = speed_map.path(section["device"])
    try:
        speed_map.save(file, speed_map_of(section))
    except (OSError, ValueError) as error:
        raise ResultsError(f"cannot write {file}: {error}") from error
    return str(file)


def speed_map_of(section: Mapping[str, Any]) -> SpeedMap:
    """The map that a section measures: shapes with rows of all recipes."""
    found: dict[str, dict[Sizes, float]] = {name: {} for name in layers.RECIPES}
    for measured in section["rows"]:
        if measured.what in found:
            found[measured.what][measured.shape] = measured.ratio
    complete = set.intersection(*(set(by_shape) for by_shape in found.values()))
    backends = {r.implementation for r in section["rows"] if r.what in found}
    speedups = {
        name: {shape: round(by_shape[shape], 3) for shape in sorted(complete)}
        for name, by_shape in found.items()
    }
    return SpeedMap(section["device"], ", ".join(sorted(backends)), speedups)


def _that_fit(shapes: Sequence[tuple[int, ...]]) -> Iterator[Sizes]:
    """The shapes that the GPU's memory holds; stderr names the others."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = _MEMORY_SHARE * stats.get("bytes_limit", math.inf)
    for M, K, N in shapes:
        weights, activations = K * N, M * (K + N)
        # Weights, gradients and their copies; activations and their gradients.
        needed = _depth((M, K, N)) * (16 * weights + 8 * activations)
        if needed <= limit:
            yield M, K, N
        else:
            what = f"without {M}, {K}, {N}"
            print(f"{what}: it needs {needed:.1e} bytes", file=sys.stderr)


def _depth(shape: Sizes) -> int:
    return _DEPTH if math.prod(shape) < _LARGE_PRODUCT else _LARGE_DEPTH
