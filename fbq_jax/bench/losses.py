"""That training on several devices is training on one: a small model's losses.

Its batches are the same however many devices share them, and so should its losses be,
but for the order in which floats are summed.  How far that alone takes a run is shown
by some whose weights are *nudged*, by a float32's last bit, before their first step.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax import recipes
from fbq_jax.bench import data, llama, measure
from fbq_jax.bench.block import choose
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.recipes.schema import Recipe

# (hidden, intermediate, layers, sequences of all devices)
SHAPES = ((1024, 4096, 4, 8),)
SEQUENCE = 512
VOCABULARY = 1024
STEPS = 50
NUDGES = 8

# What multiplies, and the dtype of all that it does not.  Gradients are summed in it:
# each device rounds its part to bfloat16 first.
RECIPES: dict[str, tuple[Recipe | None, Any]] = {
    "bf16": (None, jnp.bfloat16),
    "fallback": (recipes.fallback, jnp.bfloat16),
    "float32": (None, jnp.float32),
    "fallback, else float32": (recipes.fallback, jnp.float32),
}


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Trains each ``(hidden, intermediate, layers, sequences)``, on 1, 2, 4... devices.

    The errors of a run are the largest of its losses' relative differences: to the
    losses of one device, to the same run once more and, on one device, to the runs
    from nudged weights, the largest of them all.
    """
    numbers = [2**i for i in range(jax.device_count().bit_length())]
    for shape in shapes:
        exact: dict[str, np.ndarray] = {}  # losses of one device
        for number in numbers:
            yield from _rows_on(number, shape, exact, implementation, effort)


def _rows_on(
    number: int,
    shape: tuple[int, ...],
    exact: dict[str, np.ndarray],
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    hidden, intermediate, layers, sequences = shape
    mesh = {1: "", 2: "fsdp=2"}.get(number, f"data={number // 2},fsdp=2")
    batches = data.walks(VOCABULARY, (STEPS, 1, sequences, SEQUENCE + 1))
    baseline: Row | None = None
    for name, (recipe, dtype) in RECIPES.items():
        by, dot_general = choose(recipe, implementation)
        config = llama.config(
            hidden,
            intermediate,
            SEQUENCE,
            layers=layers,
            vocabulary=VOCABULARY,
            quantized=recipe is not None,
        )
        config = dataclasses.replace(config, dtype=dtype)
        with llama.devices(mesh):
            placed = [llama.distribute(batch) for batch in batches]
            start, step = llama.trainer(config, dot_general, learns=True)
            compiled, compile_s, _ = measure.first_step(step, _copy(start), placed[0])
            losses, state = _run(compiled, start, placed)
            errors = {"repeat": _difference(_run(compiled, start, placed)[0], losses)}
            if number == 1:
                errors["nudged"] = max(
                    _difference(_run(compiled, nudged, placed)[0], losses)
                    for nudged in (_nudged(start, seed) for seed in range(NUDGES))
                )
            rate = mean_rate({"fallback": state.fallback})
            timing, _ = measure.loop(compiled, state, placed[0], effort=effort)
        of_one = exact.setdefault(name, losses)
        measured = row(
            timing,
            llama.work(config, sequences * SEQUENCE),
            baseline,
            what=name,
            implementation=by,
            shape=shape,
            mesh=mesh or "one device",
            fallback=rate,
            errors={"one device": _difference(losses, of_one)} | errors,
            compile_s=compile_s,
        )
        baseline = baseline or measured
        yield measured


def _copy(state: Any) -> Any:
    """A step overwrites the state that it is given."""
    return jax.tree.map(jnp.copy, state)


def _nudged(state: Any, seed: int) -> Any:
    """Each weight a float32's last bit larger or smaller."""
    weights, tree = jax.tree.flatten(state.params)
    keys = jax.random.split(jax.random.key(seed), len(weights))
    nudged = jax.tree.unflatten(tree, map(_nudge, weights, keys))
    return dataclasses.replace(state, params=nudged)


@jax.jit
def _nudge(weights: jax.Array, key: jax.Array) -> jax.Array:
    signs = jax.random.rademacher(key, weights.shape, weights.dtype)
    return jnp.nextafter(weights, signs * jnp.inf)


def _run(step: Any, start: Any, batches: Sequence[Any]) -> tuple[np.ndarray, Any]:
    """The losses of a step for each batch, float64, and the state after them."""
    losses, state = [], _copy(start)
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return np.asarray(jax.device_get(losses), np.float64), state


def _difference(losses: np.ndarray, exact: np.ndarray) -> float:
    return float(np.max(np.abs(losses - exact) / exact))
