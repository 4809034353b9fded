"""``choose_recipes``, for models of any kind."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fbq_jax.choice.products import Product, Recorder, errors, outliers
from fbq_jax.choice.report import Candidate, ChoiceReport, LayerReceipt
from fbq_jax.kernels.speed_map import Sizes
from fbq_jax.recipes import NAMED
from fbq_jax.recipes.schema import Recipe

#: From fast to slow, as measured on an H200.
CANDIDATES = ("block", "row_block_lhs", "fallback")
#: The largest error of a layer's output: twice that of Gaussian operands with scales
#: per block.
BUDGET = 0.03
_ROWS = 512  # of an activation that are compared
_DEPTH = 4  # layers of a step that is timed, from K to N and back
_SETTLING_STEPS = 4  # of thresholds
Rules = Mapping[str, Recipe | None]


def choose_for(
    make_step: Callable[[Rules | None], Callable[..., Any]],
    arguments: tuple[Any, ...],
    candidates: Sequence[str],
    budget: float,
    layers: str,
) -> ChoiceReport:
    """Chooses recipes for the layers of a model, as ``fbq_jax.choose_recipes`` says.

    Args:
      make_step: takes rules, or None for the model in float, and makes a function of
        the arguments that takes a gradient by the model with these rules.
      arguments: as ``ChoiceReport.check`` takes them.
      candidates: as in ``fbq_jax.choose_recipes``.
      budget: as there.
      layers: as there.
    """
    check(candidates, budget)
    recorder, step = Recorder(_ROWS), make_step({layers: NAMED["rowwise"]})

    def look(*arguments: Any) -> ChoiceReport:
        products = recorder.record(lambda: step(*arguments))
        return choose_from(products, candidates=candidates, budget=budget)

    report = dataclasses.replace(look(*arguments), look=look)
    if all(layer.float_ms is None for layer in report.layers):
        return report
    steps = [make_step(rules) for rules in (None, report.rules)]
    times = [milliseconds(functools.partial(step, *arguments)) for step in steps]
    return dataclasses.replace(report, float_ms=times[0], chosen_ms=times[1])


def choose_from(
    products: Mapping[str, Sequence[Product]],
    *,
    candidates: Sequence[str] = CANDIDATES,
    budget: float = BUDGET,
) -> ChoiceReport:
    """Chooses recipes by the recorded products of each layer, by its path.

    The other arguments, and errors, are those of ``fbq_jax.choose_recipes``.
    """
    check(candidates, budget)
    if not products:
        raise ValueError(
            "choose_recipes found no layer whose product has a gradient: the loss is "
            "to depend on the model's output, and layers are those that quantize takes"
        )
    layers, recipes = [], tuple(NAMED[name] for name in candidates)
    for layer, found in products.items():
        ms = layer_ms(found[0].sizes, tuple(candidates))
        each = [errors(*product[:3], recipes) for product in found]
        measured = []
        for name, of_each in zip(candidates, zip(*each, strict=True), strict=True):
            y, dx, dw = (float(max(values)) for values in zip(*of_each, strict=True))
            measured.append(Candidate(name, y, dx, dw, ms.get(name)))
        largest, share = max(tuple(map(float, outliers(x.x))) for x in found)
        what = layer, found[0].sizes, len(found), largest, share, tuple(measured)
        chosen = _choose(measured, budget, ms.get("bf16"))
        layers.append(LayerReceipt(*what, *chosen, ms.get("bf16")))
    return ChoiceReport(tuple(layers), budget, jax.devices()[0].device_kind)


def check(candidates: Sequence[str], budget: float) -> None:
    """Raises a ValueError for candidates that are no recipes, or a bad budget."""
    if isinstance(candidates, str) or not candidates:
        raise ValueError(f"candidates takes names of recipes; got {candidates!r}")
    if unknown := [name for name in candidates if name not in NAMED]:
        names = ", ".join(NAMED)
        raise ValueError(f"candidates takes some of {names}; got {unknown[0]!r}")
    if not (isinstance(budget, float | int) and 0 < budget < math.inf):
        raise ValueError(f"budget takes a number above 0; got {budget!r}")


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


@functools.cache
def layer_ms(sizes: Sizes, names: Sequence[str]) -> Mapping[str, float]:
    """Milliseconds of a layer's training step by recipe, with ``"bf16"``.

    The step is that of ``python -m fbq_jax.bench step``.  Without a GPU, where INT8 is
    not faster, nothing is measured.
    """
    if jax.default_backend() != "gpu":
        return {}
    # Not with the library, which does not need them.
    from fbq_jax.bench import layers, measure, step

    M, *channels = sizes
    shape = M, min(channels), max(channels)
    stacks = [layers.bf16(_DEPTH), *layers.linen(_DEPTH, None, names)]
    found = {}
    for program in step.compiled(stacks, shape, _DEPTH):
        run = measure.RunningStep(program.step, program.start(), *step.inputs(shape))
        found[program.what] = milliseconds(run) / _DEPTH
    return found


def milliseconds(step: Callable[[], Any]) -> float:
    """Milliseconds of a step, when its thresholds have settled."""
    from fbq_jax.bench import measure

    for _ in range(_SETTLING_STEPS):
        step()
    return measure.timing(step, effort=measure.QUICK, burst_of="calls").ms
