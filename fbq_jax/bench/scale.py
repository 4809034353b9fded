"""A training step on several devices: how much faster it is, and that it is the same.

Speed is *weak scaling*: each device has the batch that one alone would have, and the
*efficiency* is the tokens a second of N devices over N times those of one.  That the
steps are the same is asked of a smaller model: its batches are the same however many
devices share them, and so should its losses be.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax import recipes
from fbq_jax.bench import data, llama, measure, memory
from fbq_jax.bench.block import SEQUENCE, choose
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.recipe import Recipe, Reduce
from fbq_jax.stats import mean_rate

# (hidden, intermediate, layers, sequences of 2048 tokens a device)
SHAPES = ((4096, 14336, 4, 8),)
AXES = ("data", "fsdp")  # of meshes with one axis
# The smaller model: (hidden, intermediate, layers, sequences of all devices).
RUN = (1024, 4096, 4, 8)
RUN_SEQUENCE = 512
RUN_VOCABULARY = 1024
RUN_STEPS = 50

RECIPES: dict[str, Recipe | None] = {"bf16": None, "fallback": recipes.fallback}


def _summed_in(reduce: Reduce) -> Recipe:
    drhs = dataclasses.replace(recipes.fallback.drhs, reduce=reduce)
    return dataclasses.replace(recipes.fallback, drhs=drhs)


# What devices sum gradients in is by default float32, and for bf16 XLA's bfloat16.
SUMS: dict[str, Recipe] = {
    "fallback, sums in bf16": _summed_in("bfloat16"),
    "fallback, sums in int8": _summed_in("int8"),
}
_STEPS = 4  # before losses are compared and anything is timed
_LOSS = 0.02  # nats that INT8 may differ from bf16 by then
# Some kernels, such as the one of the embedding's gradient, sum in the order that
# threads happen to come in.
_SAME_EACH_TIME = {"xla_gpu_exclude_nondeterministic_ops": True}


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
    exact: dict[str, np.ndarray] = {}  # losses of one device
    for n in numbers:
        yield from _losses(n, exact, implementation, effort)


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
                placed = llama.distribute(tokens)
                state, step = llama.trainer(config, dot_general)
                compiled, compile_s, state = measure.first_step(step, state, placed)
                for _ in range(_STEPS):
                    state, metrics = compiled(state, placed)
                rate = mean_rate({"fallback": state.fallback})
                timing, state = measure.loop(compiled, state, placed, effort=effort)
            del state  # before there is that of the next recipe
            loss = float(metrics["loss"])
            exact = exact or loss
            what = f"the loss of {name} at {shape} on {mesh or 'one device'}"
            measure.require(abs(loss - exact), _LOSS, what)
            speed = sequences * length / timing.ms * 1e3
            of_one = alone.setdefault((shape, name.partition(",")[0]), speed)
            measured = row(
                timing,
                llama.work(config, sequences * length),
                baseline,
                what=name,
                implementation=by,
                shape=(*shape[:3], sequences),
                mesh=mesh or "one device",
                fallback=rate,
                tokens_s=speed,
                efficiency=speed / (number * of_one),
                compile_s=compile_s,
                peak_bytes=memory.peak_bytes(compiled),
            )
            baseline = baseline or measured
            yield measured


def _losses(
    number: int,
    exact: dict[str, np.ndarray],
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Rows of the smaller model's training, twice, on so many devices."""
    hidden, intermediate, layers, sequences = RUN
    shape = RUN_STEPS, 1, sequences, RUN_SEQUENCE + 1
    mesh = {1: "", 2: "fsdp=2"}.get(number, f"data={number // 2},fsdp=2")
    baseline: Row | None = None
    for name, recipe in RECIPES.items():
        by, dot_general = choose(recipe, implementation)
        config = llama.config(
            hidden,
            intermediate,
            RUN_SEQUENCE,
            layers=layers,
            vocabulary=RUN_VOCABULARY,
            quantized=recipe is not None,
        )
        with llama.devices(mesh):
            batches = [llama.distribute(b) for b in data.walks(RUN_VOCABULARY, shape)]
            start, step = llama.trainer(config, dot_general, learns=True)
            compiled, compile_s, state = measure.first_step(
                step, _copy(start), batches[0], **_SAME_EACH_TIME
            )
            losses, again = (_run(compiled, _copy(start), batches) for _ in range(2))
            rate = mean_rate({"fallback": state.fallback})
            timing, _ = measure.loop(compiled, state, batches[0], effort=effort)
        of_one = exact.setdefault(name, losses)
        measured = row(
            timing,
            llama.work(config, sequences * RUN_SEQUENCE),
            baseline,
            what=f"{name}, {RUN_STEPS} losses",
            implementation=by,
            shape=RUN,
            mesh=mesh or "one device",
            fallback=rate,
            tokens_s=sequences * RUN_SEQUENCE / timing.ms * 1e3,
            errors={
                "losses": float(np.max(np.abs(losses - of_one) / of_one)),
                "repeat": float(np.max(np.abs(losses - again))),
            },
            compile_s=compile_s,
            peak_bytes=memory.peak_bytes(compiled),
        )
        baseline = baseline or measured
        yield measured


def _copy(state: Any) -> Any:
    """A step overwrites the state that it is given."""
    return jax.tree.map(jnp.copy, state)


def _run(step: Any, state: Any, batches: Sequence[Any]) -> np.ndarray:
    """The losses of a step for each batch, float64."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return np.asarray(jax.device_get(losses), np.float64)
