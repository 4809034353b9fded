"""``choose_recipes``, for models of any kind."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fbq_jax.choice import speed
from fbq_jax.choice.errors import Errors, errors, outliers
from fbq_jax.choice.recording import Operands, Recording
from fbq_jax.choice.report import Candidate, ChoiceReport, choose
from fbq_jax.core.visitors import visiting
from fbq_jax.recipes import NAMED

#: From fast to accurate.
CANDIDATES = ("block", "fallback", "row_block_lhs")
#: The largest error of a layer's output: twice that of Gaussian operands with scales
#: per block.  Planted outliers of 58, the smallest that were tried, give 0.056.
BUDGET = 0.03
#: The most rows of an activation that are compared.
ROWS = 1024


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
      candidates: as in ``linen.choose_recipes``.
      budget: likewise.
    """
    check(candidates, budget)
    recording = Recording(ROWS)
    with visiting(recording):
        jax.block_until_ready(step())
    jax.effects_barrier()
    if not recording.products:
        raise ValueError(
            "choose_recipes found no layer whose product has a gradient: the loss is "
            "to depend on the model's output, and layers are those that quantize takes"
        )
    times = speed.measure_shapes(
        {product.sizes for found in recording.products.values() for product in found},
        candidates,
    )
    layers = []
    for layer, found in sorted(recording.products.items()):
        sizes, ms = found[0].sizes, times.get(found[0].sizes, {})
        worst = max(map(outliers, found))
        measured = [
            Candidate(name, _largest_errors(found, name), ms.get(name))
            for name in candidates
        ]
        layers.append(
            choose(layer, sizes, len(found), worst, measured, budget, ms.get("bf16"))
        )
    step_ms = _milliseconds(float_step) if times else None
    device = jax.devices()[0].device_kind
    return ChoiceReport(tuple(layers), budget, device, step_ms)


def check(candidates: Sequence[str], budget: float) -> None:
    """Raises ValueError for candidates or a budget that ``choose_recipes`` lacks."""
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


def _milliseconds(step: Callable[[], Any]) -> float:
    jax.block_until_ready(step())
    start, count = time.perf_counter(), 5
    for _ in range(count):
        out = step()
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - start) / count
