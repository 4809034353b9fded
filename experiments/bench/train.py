"""An optimizer step of a Llama with a billion parameters, in bf16 and by recipe."""

import dataclasses
from collections.abc import Iterator, Sequence

from experiments.bench import harness
from fbq_jax.bench import layers, measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, with_ratios

# (hidden, intermediate, layers, sequences of 2048 tokens): a billion parameters in
# layers of Llama 3 8B's width, and TinyLlama's 1.1 billion.
SHAPES = ((4096, 14336, 4, 8), (2048, 5632, 22, 4))
_STEPS = 8  # before anything is compared or timed
# The limits of INT8's errors: nats, and a share of the gradient norm.
_LIMITS = {"loss": 0.02, "grad_norm": 0.1}


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each of these shapes of `harness.Program`.

    Layers are in a loop. A step is AdamW on float32 weights, always with the same
    random tokens; where codes are kept, AdamW writes those of the weights. Raises
    WrongResultError if the loss or the gradient norm differs from bf16's by more than
    INT8 may.
    """
    of = harness.recipes()
    for shape in shapes:
        programs = [harness.Program(*item, shape) for item in of.items()]
        programs += [
            harness.Program(name, of[name], shape, keeps_codes=True)
            for name in layers.RECIPES
            if name in of
        ]
        yield from with_ratios(_measure(programs, implementation, effort))


def _measure(
    programs: Sequence[harness.Program], implementation: str | None, effort: Effort
) -> Iterator[Row]:
    exact: dict[str, float] = {}
    for program in programs:
        measured, metrics = harness.train(
            program, implementation, steps=_STEPS, effort=effort
        )
        actual = {of: float(metrics[of]) for of in _LIMITS}
        exact = exact or actual
        errors = {of: abs(actual[of] - exact[of]) for of in _LIMITS}
        errors["grad_norm"] /= exact["grad_norm"]
        for of, limit in _LIMITS.items():
            what = f"{of} of {measured.what} at {program.shape}"
            measure.require(errors[of], limit, what)
        yield dataclasses.replace(measured, errors=errors)
