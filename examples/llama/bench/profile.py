"""The time of each kernel of a Llama block, in bf16 and quantized."""

import collections
from collections.abc import Iterator, Sequence

from examples.llama.bench import block, harness
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort, Timing
from fbq_jax.bench.results import Row

SHAPES = ((4096, 14336, 16384),)
_RECIPES = ("bf16", "fallback")
_MIN_SHARE = 0.005  # Kernels with a smaller share of the time are added up in one row.


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each kernel of a block's forward and backward pass, as `kernel_rows`."""
    del effort
    recipes = harness.recipes()
    for shape in shapes:
        for name in _RECIPES:
            program = block.prepare(shape, recipes[name], implementation)
            yield from _kernel_rows(
                measure.kernels(program.step, *program.operands),
                what=name,
                implementation=program.implementation,
                shape=shape,
            )


def _kernel_rows(
    kernels: Sequence[tuple[str, float]],
    *,
    what: str,
    implementation: str,
    shape: tuple[int, ...],
) -> Iterator[Row]:
    """The rows of a program's kernels, by their names and milliseconds."""
    times: dict[str, float] = collections.defaultdict(float)
    for kernel, ms in kernels:
        times[kernel] += ms
    total = sum(times.values())
    long = {kernel: ms for kernel, ms in times.items() if ms >= _MIN_SHARE * total}
    named = [
        (f"{what}: all kernels", total),
        *sorted(long.items(), key=lambda item: -item[1]),
        ("shorter ones", total - sum(long.values())),
    ]
    for name, ms in named:
        yield Row(
            what=name,
            implementation=implementation,
            shape=shape,
            **Timing(ms, ms, "kernels")._asdict(),
            rate=100.0 * ms / total,
        )
