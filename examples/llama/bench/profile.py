"""The time of each kernel of a Llama block, in bf16 and quantized."""

from collections.abc import Iterator, Sequence

from examples.llama.bench import block, harness
from fbq_jax.bench import measure
from fbq_jax.bench.kernel_rows import kernel_rows
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row

SHAPES = ((4096, 14336, 16384),)
_RECIPES = ("bf16", "fallback")


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each kernel of a block's forward and backward pass.

    The rows are those of `kernel_rows`.

    Raises:
      NoKernelsError: if the profiler cannot time single kernels.
    """
    del effort
    recipes = harness.recipes()
    for shape in shapes:
        for name in _RECIPES:
            program = block.prepare(shape, recipes[name], implementation)
            yield from kernel_rows(
                measure.kernels(program.step, *program.operands),
                what=name,
                implementation=program.implementation,
                shape=shape,
            )
