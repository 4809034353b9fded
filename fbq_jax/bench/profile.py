"""Where the time of a Llama block goes, by kernel, in bf16 and quantized."""

import collections
from collections.abc import Iterator, Sequence

from fbq_jax.bench import block, llama, measure
from fbq_jax.bench.measure import Effort, Timing
from fbq_jax.bench.results import Row

SHAPES = ((4096, 14336, 16384),)
_RECIPES = ("bf16", "fallback")
_LEAST = 0.005  # of the whole: kernels of less are one row together


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each kernel of a block's forward and backward pass, in a burst.

    What the kernels of one name take together is a row, the longest first; its rate is
    their share of the block in percent.  A row of the whole is before them.

    Raises:
      measure.NoKernelsError: where the profiler cannot tell kernels apart.
    """
    del effort
    recipes = llama.recipes()
    for shape in shapes:
        for name in _RECIPES:
            program = block.prepare(shape, recipes[name], implementation)
            times: dict[str, float] = collections.defaultdict(float)
            for kernel, ms in measure.kernels(program.step, *program.operands):
                times[kernel] += ms
            whole = sum(times.values())
            yield _row(f"{name}: all kernels", program.by, shape, whole, whole)
            short = 0.0
            for kernel, ms in sorted(times.items(), key=lambda item: -item[1]):
                if ms < _LEAST * whole:
                    short += ms
                else:
                    yield _row(kernel, program.by, shape, ms, whole)
            yield _row("shorter ones", program.by, shape, short, whole)


def _row(what: str, by: str, shape: tuple[int, ...], ms: float, whole: float) -> Row:
    return Row(
        what=what,
        implementation=by,
        shape=shape,
        **Timing(ms, ms, "kernels")._asdict(),
        rate=100.0 * ms / whole,
    )
