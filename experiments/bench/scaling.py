"""Weak scaling: how much faster a training step is on several devices.

Each device has the batch that one device alone would have. The *efficiency* is the
tokens per second of N devices over N times the tokens per second of one device.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from experiments.bench import harness
from fbq_jax import Recipe, recipes
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, with_ratios

# (hidden, intermediate, layers, sequences of 2048 tokens per device)
SHAPES = ((4096, 14336, 4, 8),)
AXES = ("data", "fsdp")  # Each mesh has one of them.

RECIPES: dict[str, Recipe | None] = {"bf16": None, "fallback": recipes.fallback}
# Gradients are otherwise summed across devices in bfloat16, the layers' dtype.
REDUCES: dict[str, Recipe] = {
    f"fallback, sums in {dtype}": dataclasses.replace(
        recipes.fallback, drhs=dataclasses.replace(recipes.fallback.drhs, reduce=dtype)
    )
    for dtype in ("float32", "int8")
}
_STEPS = 4  # before losses are compared and anything is timed
_LOSS_LIMIT = 0.02  # nats between INT8 and bf16 after these steps


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each ``(hidden, intermediate, layers, sequences per device)``.

    Runs on one device, on all (to a power of two), then on the powers of two between.
    Layers are in a loop, and then unrolled. Only the largest mesh measures ``REDUCES``,
    with the layers in a loop. Raises WrongResultError if a recipe's loss after a few
    steps is not bf16's.
    """
    numbers = [2**i for i in range(jax.device_count().bit_length())]
    # Steps are long, and there are many programs.
    effort = effort._replace(samples=min(effort.samples, 8), launches=4)
    alone: dict[Any, float] = {}  # tokens per second of one device
    for n in dict.fromkeys((1, numbers[-1], *numbers)):
        meshes = [f"{axis}={n}" for axis in AXES] if n > 1 else [""]
        for shape, mesh, unroll in itertools.product(shapes, meshes, (False, True)):
            has_reduces = n == numbers[-1] > 1 and not unroll
            chosen = RECIPES | (REDUCES if has_reduces else {})
            size = (*shape[:3], shape[3] * n)
            programs = [
                harness.Program(name, recipe, size, mesh, unroll=unroll)
                for name, recipe in chosen.items()
            ]
            measured = _measure(programs, n, alone, implementation, effort)
            yield from with_ratios(measured)


def _measure(
    programs: Sequence[harness.Program],
    number: int,
    alone: dict[Any, float],
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Times programs on ``number`` devices; ``alone`` gets the speeds of one device."""
    exact = 0.0
    for program in programs:
        measured, metrics = harness.train(
            program, implementation, steps=_STEPS, effort=effort
        )
        mesh, loss = program.mesh or harness.ONE_DEVICE, float(metrics["loss"])
        exact = exact or loss
        what = f"the loss of {measured.what} at {program.shape} on {mesh}"
        measure.require(abs(loss - exact), _LOSS_LIMIT, what)
        speed = math.prod(program.batch()) / measured.ms * 1e3
        *model, sequences = program.shape
        recipe = program.name.partition(",")[0]
        compared = *model, sequences // number, recipe, program.unroll
        efficiency = speed / (number * alone.setdefault(compared, speed))
        yield dataclasses.replace(
            measured, mesh=mesh, tokens_s=speed, efficiency=efficiency
        )
