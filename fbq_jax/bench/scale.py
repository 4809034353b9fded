"""How much faster a training step is on several devices.

This is *weak scaling*: each device has the batch that one alone would have, and the
*efficiency* is the tokens a second of N devices over N times those of one.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from fbq_jax import recipes
from fbq_jax.bench import llama, measure
from fbq_jax.bench.block import SEQUENCE, choose
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.recipes.schema import Recipe, Reduce

# (hidden, intermediate, layers, sequences of 2048 tokens a device)
SHAPES = ((4096, 14336, 4, 8),)
AXES = ("data", "fsdp")  # of meshes with one axis

RECIPES: dict[str, Recipe | None] = {"bf16": None, "fallback": recipes.fallback}


def _summed_in(reduce: Reduce) -> Recipe:
    drhs = dataclasses.replace(recipes.fallback.drhs, reduce=reduce)
    return dataclasses.replace(recipes.fallback, drhs=drhs)


# What devices sum gradients in is otherwise bfloat16, the layers' dtype.
SUMS: dict[str, Recipe] = {
    "fallback, sums in float32": _summed_in("float32"),
    "fallback, sums in int8": _summed_in("int8"),
}
_STEPS = 4  # before losses are compared and anything is timed
_LOSS = 0.02  # nats that INT8 may differ from bf16 by then


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each ``(hidden, intermediate, layers, sequences a device)``.

    On one device and on each power of two of them; what tells most comes first, and
    only the most devices have all of the sums.

    Raises:
      WrongResultError: if the loss of a recipe after a few steps is not bf16's.
    """
    numbers = [2**i for i in range(jax.device_count().bit_length())]
    # Steps are long, and there are many programs.
    effort = effort._replace(samples=min(effort.samples, 8), launches=4)
    alone: dict[Any, float] = {}  # tokens a second of one device
    for n in dict.fromkeys((1, numbers[-1], *numbers)):
        for shape in shapes:
            others = SUMS if n == numbers[-1] > 1 else {}
            yield from _speeds(shape, n, others, alone, implementation, effort)


def _speeds(
    shape: tuple[int, ...],
    number: int,
    others: dict[str, Recipe],
    alone: dict[Any, float],
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Rows of a shape on so many devices, by mesh and recipe."""
    hidden, intermediate, layers, sequences = shape
    length, sequences = min(SEQUENCE, hidden), sequences * number
    tokens = llama.random_tokens(sequences, length)
    for mesh in [f"{axis}={number}" for axis in AXES] if number > 1 else [""]:
        baseline: Row | None = None
        exact = 0.0
        for name, recipe in (RECIPES | others).items():
            by, dot_general = choose(recipe, implementation)
            config = llama.config(
                hidden,
                intermediate,
                length,
                layers=layers,
                vocabulary=llama.VOCABULARY,
                quantized=recipe is not None,
            )
            with llama.devices(mesh):
                trained = llama.train(
                    config,
                    dot_general,
                    llama.distribute(tokens),
                    steps=_STEPS,
                    effort=effort,
                )
            loss = float(trained.metrics["loss"])
            exact = exact or loss
            what = f"the loss of {name} at {shape} on {mesh or 'one device'}"
            measure.require(abs(loss - exact), _LOSS, what)
            speed = sequences * length / trained.timing.ms * 1e3
            of_one = alone.setdefault((shape, name.partition(",")[0]), speed)
            measured = row(
                trained.timing,
                llama.work(config, sequences * length),
                baseline,
                what=name,
                implementation=by,
                shape=(*shape[:3], sequences),
                mesh=mesh or "one device",
                fallback=trained.fallback,
                tokens_s=speed,
                efficiency=speed / (number * of_one),
                compile_s=trained.compile_s,
                peak_bytes=trained.peak_bytes,
            )
            baseline = baseline or measured
            yield measured
