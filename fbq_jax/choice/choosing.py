"""``choose_recipes``, for models of any kind."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fbq_jax.choice import speed
from fbq_jax.choice.errors import Errors, errors, outliers
from fbq_jax.choice.recording import Operands, Recording
from fbq_jax.choice.report import Candidate, ChoiceReport, LayerReceipt
from fbq_jax.core.visitors import visiting
from fbq_jax.recipes import NAMED

#: From fast to accurate.
CANDIDATES = ("block", "fallback", "row_block_lhs")
#: The largest error of a layer's output: twice that of Gaussian operands with scales
#: per block.
BUDGET = 0.03
_ROWS = 1024  # of an activation that are compared
_STEPS = 5  # that are timed


def choose_for(
    step: Callable[[], Any],
    float_step: Callable[[], Any],
    candidates: Sequence[str],
    budget: float,
) -> ChoiceReport:
    """Runs a step, and chooses a recipe for each layer that it shows.

    Args:
      step: takes the gradient of a loss by a model whose layers have quantized ops.
      float_step: the same, by the model in float.
      candidates: as in ``fbq_jax.choose_recipes``.
      budget: as there.
    """
    _check(candidates, budget)
    recording = Recording(_ROWS)
    with visiting(recording):
        jax.block_until_ready(step())
    jax.effects_barrier()
    if not (products := recording.products):
        raise ValueError(
            "choose_recipes found no layer whose product has a gradient: the loss is "
            "to depend on the model's output, and layers are those that quantize takes"
        )
    times = speed.measure_shapes({x[0].sizes for x in products.values()}, candidates)
    layers = []
    for layer, found in sorted(products.items()):
        ms = times.get(found[0].sizes, {})
        measured = tuple(
            Candidate(name, _largest_errors(found, name), ms.get(name))
            for name in candidates
        )
        chosen, reason = _choose(measured, budget, ms.get("bf16"))
        what = layer, found[0].sizes, len(found), max(map(outliers, found))
        layers.append(LayerReceipt(*what, measured, chosen, reason, ms.get("bf16")))
    step_ms = _milliseconds(float_step) if times else None
    return ChoiceReport(tuple(layers), budget, jax.devices()[0].device_kind, step_ms)


def _check(candidates: Sequence[str], budget: float) -> None:
    if isinstance(candidates, str) or not candidates:
        raise ValueError(f"candidates takes names of recipes; got {candidates!r}")
    if unknown := [name for name in candidates if name not in NAMED]:
        raise ValueError(
            f"candidates takes names of recipes, {', '.join(NAMED)}; got {unknown[0]!r}"
        )
    if not (isinstance(budget, float | int) and 0 < budget < math.inf):
        raise ValueError(f"budget takes a number above 0; got {budget!r}")


def _largest_errors(products: Sequence[Operands], recipe: str) -> Errors:
    found = [errors(product, NAMED[recipe]) for product in products]
    return Errors(*(max(values) for values in zip(*found, strict=True)))


def _choose(
    candidates: Sequence[Candidate], budget: float, float_ms: float | None
) -> tuple[str | None, str]:
    """The fastest candidate inside the budget, or None, and the reason.

    Where times are not measured, candidates are as fast as their order says.
    """
    inside = [c for c in candidates if c.error <= budget]
    if not inside:
        least = min(candidates, key=lambda c: c.error)
        return None, f"no candidate is inside: {least.recipe} has {least.error:.3f}"
    best = min(inside, key=lambda c: c.ms or 0.0)
    if best.ms is not None and float_ms is not None and best.ms >= float_ms:
        return None, f"{best.ms:.3f} ms with {best.recipe}, {float_ms:.3f} ms in float"
    reason = f"error {best.error:.3f}"
    if worse := [f"{c.recipe} {c.error:.3f}" for c in candidates if c not in inside]:
        reason += f"; above the budget: {', '.join(worse)}"
    return best.recipe, reason


def _milliseconds(step: Callable[[], Any]) -> float:
    jax.block_until_ready(step())
    start = time.perf_counter()
    jax.block_until_ready([step() for _ in range(_STEPS)])
    return 1e3 * (time.perf_counter() - start) / _STEPS
