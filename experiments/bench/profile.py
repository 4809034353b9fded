"""The time of each kernel of a Llama block, in bf16 and quantized."""

import collections
from collections.abc import Iterator, Sequence

from experiments.bench import block, harness
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort, Timing
from fbq_jax.bench.results import Row

SHAPES = ((4096, 14336, 16384),)
_RECIPES = ("bf16", "fallback")
_MIN_SHARE = 0.005  # Kernels with a smaller share of the time are added up in one row.


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each kernel of a block's forward and backward pass."""
    del effort
    recipes = harness.recipes()
    for shape in shapes:
        for name in _RECIPES:
            program = block.prepare(shape, recipes[name], implementation)
            times: dict[str, float] = collections.defaultdict(float)
            for kernel, ms in measure.kernels(program.step, *program.operands):
                times[kernel] += ms
            total = sum(times.values())
            longest = sorted(times.items(), key=lambda item: -item[1])
            long = [item for item in longest if item[1] >= _MIN_SHARE * total]
            rest = "shorter ones", total - sum(ms for _, ms in long)
            for what, ms in (f"{name}: all kernels", total), *long, rest:
                yield Row(
                    what=what,
                    implementation=program.implementation,
                    shape=shape,
                    **Timing(ms, ms, "kernels")._asdict(),
                    rate=100.0 * ms / total,
                )
