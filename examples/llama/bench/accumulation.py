"""An optimizer step of a Llama that accumulates the gradients of microbatches."""

import dataclasses
from collections.abc import Iterator, Sequence

from examples.llama.bench import train
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row

# (hidden, intermediate, layers, sequences of a microbatch, microbatches): TinyLlama's
# 1.1 billion parameters, with 8192 and with 2048 tokens at a time.
SHAPES = ((2048, 5632, 22, 4, 4), (2048, 5632, 22, 1, 4))


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures the steps of ``train``, with several microbatches."""
    for *shape, microbatches in shapes:
        for row in train.rows(
            [tuple(shape)],
            implementation=implementation,
            effort=effort,
            microbatches=microbatches,
        ):
            yield dataclasses.replace(row, shape=(*shape, microbatches))
