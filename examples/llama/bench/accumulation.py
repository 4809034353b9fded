"""An optimizer step of a Llama that accumulates the gradients of microbatches."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from examples.llama.bench import train
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, with_ratios

# (hidden, intermediate, layers, sequences of a microbatch, microbatches): TinyLlama's
# 1.1 billion parameters, with 8192 and with 2048 tokens at a time.
SHAPES = ((2048, 5632, 22, 4, 4), (2048, 5632, 22, 1, 4))


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each ``(hidden, intermediate, layers, sequences, microbatches)``.

    The steps are those of ``train``, with the same errors.
    """
    for shape, unroll in itertools.product(shapes, (False, True)):
        *model, microbatches = shape
        measured = train.measure_recipes(
            tuple(model),
            implementation,
            effort,
            microbatches=microbatches,
            unroll=unroll,
        )
        yield from with_ratios(
            dataclasses.replace(row, shape=shape) for row in measured
        )
