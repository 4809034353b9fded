"""The receipt of a choice: what was measured, what was chosen, and why."""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fbq_jax.choice.errors import Errors, Outliers
from fbq_jax.choice.recording import Sizes
from fbq_jax.recipes import NAMED
from fbq_jax.recipes.schema import Recipe

#: Gradients may have so many times the error of outputs: their rounding is stochastic,
#: so errors of many steps cancel.
GRADIENTS = 10.0


class Candidate(NamedTuple):
    """What a recipe would do to a layer.

    Attributes:
      recipe: its name.
      errors: the largest errors of the layer's products, and of all layers of a stack.
      ms: milliseconds of the three products on this device; None if not measured.
    """

    recipe: str
    errors: Errors
    ms: float | None = None

    @property
    def error(self) -> float:
        """What is compared with the budget."""
        y, dx, dw = self.errors
        return max(y, dx / GRADIENTS, dw / GRADIENTS)


class LayerReceipt(NamedTuple):
    """The choice for a layer, or for a stack of layers, which share a recipe.

    Attributes:
      layer: its path.
      sizes: M, K and N of its product; M is the number of tokens.
      stack: its products in a step, more than one in a stack.
      outliers: of its activation.
      candidates: from fast to accurate.
      chosen: the name of a candidate; None leaves the layer in float.
      reason: why.
      float_ms: milliseconds of its products in float; None if not measured.
    """

    layer: str
    sizes: Sizes
    stack: int
    outliers: Outliers
    candidates: tuple[Candidate, ...]
    chosen: str | None
    reason: str
    float_ms: float | None = None

    @property
    def chosen_ms(self) -> float | None:
        """Milliseconds of one product as chosen."""
        times = {c.recipe: c.ms for c in self.candidates}
        return self.float_ms if self.chosen is None else times[self.chosen]

    @property
    def saved_bytes(self) -> int:
        """Bytes less that the backward pass reads of X, whose codes take one byte."""
        M, K, _ = self.sizes
        return 0 if self.chosen is None else self.stack * M * K


@dataclasses.dataclass(frozen=True)
class ChoiceReport:
    """What ``choose_recipes`` measured and chose; ``print`` shows it as a table.

    Attributes:
      layers: the receipts, in the order of the layers' paths.
      budget: the largest error of a layer's output.
      device: what it was measured on.
      step_ms: milliseconds of a step in float; None if not measured.
    """

    layers: tuple[LayerReceipt, ...]
    budget: float
    device: str
    step_ms: float | None = None

    @property
    def rules(self) -> dict[str, Recipe | None]:
        """The rules for ``quantize``: the exact path of each layer, as a pattern."""
        return {
            layer.layer: None if layer.chosen is None else NAMED[layer.chosen]
            for layer in self.layers
        }

    @property
    def predicted_ms(self) -> float | None:
        """Milliseconds of a step as chosen; None if not measured."""
        saved = 0.0
        for layer in self.layers:
            if layer.float_ms is None or layer.chosen_ms is None:
                return None
            saved += layer.stack * (layer.float_ms - layer.chosen_ms)
        return None if self.step_ms is None else self.step_ms - saved

    @property
    def speedup(self) -> float | None:
        """How many times as fast as in float a step is predicted to be."""
        predicted = self.predicted_ms
        return None if predicted is None else (self.step_ms or 0.0) / predicted

    def __str__(self) -> str:
        names = [c.recipe for c in self.layers[0].candidates]
        head = ["layer", "M, K, N", "largest", "outliers", *names, "choice", "why"]
        rows = [head, *map(_row, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        saved = sum(layer.saved_bytes for layer in self.layers)
        lines.append(
            f"error of Y at most {self.budget:g}, on {self.device}; the backward pass "
            f"reads {saved / 2**20:,.0f} MiB less"
        )
        if self.speedup is not None:
            lines.append(
                f"a step is predicted to take {self.predicted_ms:.2f} ms in place of "
                f"{self.step_ms:.2f} ms ({self.speedup:.2f} times as fast)"
            )
        return "\n".join(lines)

    def save(self, file: Path | str) -> None:
        """Writes the report as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=1, default=_as_json)
        Path(file).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path | str) -> "ChoiceReport":
        """Reads a report that ``save`` wrote.

        Raises:
          ValueError: the file holds something else.
        """
        try:
            return _from_json(json.loads(Path(file).read_text(encoding="utf-8")))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} holds no report of choose_recipes") from error

    def warn_of_changes(self, now: "ChoiceReport") -> list[str]:
        """Warns of each layer that has left its budget since this report.

        Args:
          now: a later report of the same model.

        Returns:
          The paths of these layers.
        """
        chosen = {layer.layer: layer.chosen for layer in self.layers}
        left = []
        for layer in now.layers:
            was = chosen.get(layer.layer)
            errors = {c.recipe: c.error for c in layer.candidates}
            if was is None or errors[was] <= self.budget:
                continue
            left.append(layer.layer)
            warnings.warn(
                f"layer {layer.layer!r} has left its budget: the error of {was!r} is "
                f"{errors[was]:.3f}, above {self.budget:g}; now the choice would be "
                f"{layer.chosen or 'float'} ({layer.reason})",
                stacklevel=2,
            )
        return left


def choose(
    layer: str,
    sizes: Sizes,
    stack: int,
    outliers: Outliers,
    candidates: Sequence[Candidate],
    budget: float,
    float_ms: float | None,
) -> LayerReceipt:
    """The receipt of a layer: the fastest candidate inside the budget.

    Where times are not measured, candidates are as fast as their order says.
    """
    inside = [c for c in candidates if c.error <= budget]
    faster = [c for c in inside if c.ms is None or float_ms is None or c.ms < float_ms]
    chosen = min(faster, key=lambda c: c.ms or 0.0, default=None)
    if chosen is not None:
        others = [c for c in candidates if c.error > budget]
        reason = f"error {chosen.error:.3f}"
        if others:
            worse = ", ".join(f"{c.recipe} {c.error:.3f}" for c in others)
            reason += f"; above the budget: {worse}"
    elif inside:
        best = min(c.ms or math.inf for c in inside)
        reason = f"INT8 would be slower: {best:.3f} ms, {float_ms:.3f} ms in float"
    else:
        least = min(candidates, key=lambda c: c.error)
        reason = f"no candidate is inside: {least.recipe} has {least.error:.3f}"
    return LayerReceipt(
        layer,
        sizes,
        stack,
        outliers,
        tuple(candidates),
        None if chosen is None else chosen.recipe,
        reason,
        float_ms,
    )


def _row(layer: LayerReceipt) -> list[str]:
    stack = f"{layer.stack} x " if layer.stack > 1 else ""
    return [
        layer.layer,
        f"{stack}{', '.join(map(str, layer.sizes))}",
        f"{layer.outliers.largest:.0f} rms",
        f"{layer.outliers.share:.1%}",
        *(_cell(c, layer.float_ms) for c in layer.candidates),
        layer.chosen or "float",
        layer.reason,
    ]


def _cell(candidate: Candidate, float_ms: float | None) -> str:
    error = f"{candidate.errors.y:.3f}"
    if candidate.ms is None or float_ms is None:
        return error
    return f"{error}, {float_ms / candidate.ms:.2f}x"


def _as_json(x: Any) -> Any:
    raise TypeError(type(x))


def _from_json(content: Mapping[str, Any]) -> ChoiceReport:
    layers = []
    for row in content["layers"]:
        name, sizes, stack, found, candidates, *rest = row
        layers.append(
            LayerReceipt(
                name,
                tuple(sizes),
                stack,
                Outliers(*found),
                tuple(Candidate(n, Errors(*e), ms) for n, e, ms in candidates),
                *rest,
            )
        )
    return ChoiceReport(
        tuple(layers), content["budget"], content["device"], content["step_ms"]
    )
