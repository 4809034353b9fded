"""Whether training on several devices has the losses of training on one.

The batches do not depend on the number of devices, so the losses should not either,
except for the order of floating-point sums. Runs whose initial weights differ by one
float32 ulp (*nudged*) show how far such differences grow.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import harness
from fbq_jax import Recipe, recipes
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.core.layer_stats import mean_rate

# (hidden, intermediate, layers, sequences of all devices together)
SHAPES = ((1024, 4096, 4, 8),)
SEQUENCE = 512
VOCABULARY = 1024
STEPS = 50
NUDGES = 8

# The recipe, and the dtype of everything else. Gradients are summed in that dtype, so
# in bfloat16 each device first rounds its part.
RECIPES: dict[str, tuple[Recipe | None, Any]] = {
    "bf16": (None, jnp.bfloat16),
    "fallback": (recipes.fallback, jnp.bfloat16),
    "float32": (None, jnp.float32),
    "fallback, else float32": (recipes.fallback, jnp.float32),
}


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Trains each ``(hidden, intermediate, layers, sequences)`` on 1, 2, 4... devices.

    The errors of a run are the largest relative differences of its losses: to one
    device, to a repetition of the run and, on one device, to all nudged runs.
    """
    numbers = [2**i for i in range(jax.device_count().bit_length())]
    for shape in shapes:
        exact: dict[str, np.ndarray] = {}  # losses of one device
        for number in numbers:
            yield from with_ratios(
                _measure(name, number, shape, exact, implementation, effort)
                for name in RECIPES
            )


def _measure(
    name: str,
    number: int,
    shape: tuple[int, ...],
    exact: dict[str, np.ndarray],
    implementation: str | None,
    effort: Effort,
) -> Row:
    hidden, intermediate, layers, sequences = shape
    recipe, dtype = RECIPES[name]
    backend, dot_general = harness.dot_general(recipe, implementation)
    sizes = {"num_layers": layers, "vocab_size": VOCABULARY, "dtype": dtype}
    quantized = recipe is not None
    config = harness.config(
        hidden, intermediate, SEQUENCE, quantized=quantized, **sizes
    )
    mesh = {1: "", 2: "fsdp=2"}.get(number, f"data={number // 2},fsdp=2")
    with harness.devices(mesh):
        walks = random_walks(VOCABULARY, (STEPS, 1, sequences, SEQUENCE + 1))
        batches = [harness.distribute(batch) for batch in walks]
        start, step = harness.trainer(config, dot_general, learns=True)
        compiled, compile_s, _ = measure.first_call(step, _copy(start), batches[0])
        losses, state = _run(compiled, start, batches)
        exact.setdefault(name, losses)
        errors = {harness.ONE_DEVICE: _difference(losses, exact[name])}
        errors["repeat"] = _difference(_run(compiled, start, batches)[0], losses)
        if number == 1:
            nudged = (_nudged(start, seed) for seed in range(NUDGES))
            errors["nudged"] = max(
                _difference(_run(compiled, start, batches)[0], losses)
                for start in nudged
            )
        fallback = mean_rate({"fallback": state.fallback})
        timing = measure.step_timing(compiled, state, batches[0], effort=effort)
    return row(
        timing,
        harness.work(config, sequences * SEQUENCE),
        what=name,
        implementation=backend,
        shape=shape,
        mesh=mesh or harness.ONE_DEVICE,
        fallback=fallback,
        errors=errors,
        compile_s=compile_s,
    )


def random_walks(vocabulary: int, shape: tuple[int, ...]) -> np.ndarray:
    """Learnable tokens, int32 ``[..., S]``: each token has four possible successors."""
    draw = np.random.default_rng(0).integers
    successors = draw(0, vocabulary, (vocabulary, 4), np.int32)
    choices = draw(0, 4, shape)
    tokens = draw(0, vocabulary, shape, np.int32)
    for i in range(1, shape[-1]):
        tokens[..., i] = successors[tokens[..., i - 1], choices[..., i]]
    return tokens


def _copy(state: Any) -> Any:
    """A copy for a step to donate."""
    return jax.tree.map(jnp.copy, state)


def _nudged(state: Any, seed: int) -> Any:
    """A state whose weights are one float32 ulp larger or smaller."""
    weights, tree = jax.tree.flatten(state.params)
    keys = jax.random.split(jax.random.key(seed), len(weights))
    nudged = jax.tree.unflatten(tree, map(_nudge, weights, keys))
    return dataclasses.replace(state, params=nudged)


@jax.jit
def _nudge(weights: jax.Array, key: jax.Array) -> jax.Array:
    signs = jax.random.rademacher(key, weights.shape, weights.dtype)
    return jnp.nextafter(weights, signs * jnp.inf)


def _run(step: Any, start: Any, batches: Sequence[Any]) -> tuple[np.ndarray, Any]:
    """The losses of one step per batch, float64, and the last state."""
    losses, state = [], _copy(start)
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return np.asarray(jax.device_get(losses), np.float64), state


def _difference(losses: np.ndarray, exact: np.ndarray) -> float:
    return float(np.max(np.abs(losses - exact) / exact))
