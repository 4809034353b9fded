"""The receipt of a choice: what was measured, what was chosen, and why."""

import dataclasses
import json
import math
import warnings
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

    def saved_ms(self) -> float | None:
        """Milliseconds that the choice saves in a step; None if not measured."""
        if self.float_ms is None or self.chosen is None:
            return None if self.float_ms is None else 0.0
        ms = next(c.ms for c in self.candidates if c.recipe == self.chosen)
        return None if ms is None else self.stack * (self.float_ms - ms)


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
        """The rules for ``quantize``: the path of each layer, as a pattern."""
        return {
            layer.layer: None if layer.chosen is None else NAMED[layer.chosen]
            for layer in self.layers
        }

    @property
    def predicted_ms(self) -> float | None:
        """Milliseconds of a step as chosen; None if not measured."""
        saved = [layer.saved_ms() for layer in self.layers]
        if self.step_ms is None or None in saved:
            return None
        return self.step_ms - sum(filter(None, saved))

    def __str__(self) -> str:
        names = [c.recipe for c in self.layers[0].candidates]
        head = ["layer", "M, K, N", "largest", "outliers", *names, "choice", "why"]
        rows = [head, *map(_row, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        sizes = [math.prod(x.sizes[:2]) * x.stack for x in self.layers if x.chosen]
        lines.append(
            f"error of Y at most {self.budget:g}, on {self.device}; the backward pass "
            f"reads {sum(sizes) / 2**20:,.0f} MiB less"
        )
        if (predicted := self.predicted_ms) is not None and self.step_ms is not None:
            lines.append(
                f"a step is predicted to take {predicted:.2f} ms, in place of "
                f"{self.step_ms:.2f} ms ({self.step_ms / predicted:.2f} times as fast)"
            )
        return "\n".join(lines)

    def draw(self) -> Any:
        """A figure of Matplotlib: each layer's error by candidate, and the budget."""
        from matplotlib.figure import Figure  # which nothing else here needs

        figure = Figure(figsize=(8, 1 + 0.3 * len(self.layers)), layout="constrained")
        axes, rows = figure.subplots(), list(range(len(self.layers)))
        for n, candidate in enumerate(self.layers[0].candidates):
            errors = [layer.candidates[n].error for layer in self.layers]
            (points,) = axes.plot(
                errors, rows, "o", fillstyle="none", label=candidate.recipe
            )
            for row, layer in enumerate(self.layers):
                if layer.chosen == candidate.recipe:
                    axes.plot(errors[row], row, "o", color=points.get_color())
        axes.axvline(self.budget, color="black", linewidth=1, label="budget")
        axes.set(xscale="log", xlabel="error of Y (filled: chosen)")
        axes.set_yticks(rows, [layer.layer for layer in self.layers])
        axes.invert_yaxis()
        axes.legend()
        return figure

    def save(self, file: Path | str) -> None:
        """Writes the report as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        Path(file).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path | str) -> "ChoiceReport":
        """Reads a report that ``save`` wrote.

        Raises:
          ValueError: the file holds something else.
        """
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            layers = tuple(map(_read_layer, content.pop("layers")))
            return cls(layers, **content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no report of choose_recipes") from error

    def warn_of_changes(self, now: "ChoiceReport") -> list[str]:
        """Warns of each layer that has left its budget since this report.

        Args:
          now: a later report of the same model.

        Returns:
          The paths of these layers.
        """
        chosen, left = {layer.layer: layer.chosen for layer in self.layers}, []
        for layer in now.layers:
            for candidate in layer.candidates:
                if candidate.recipe != chosen.get(layer.layer):
                    continue
                if candidate.error <= self.budget:
                    continue
                left.append(layer.layer)
                warnings.warn(
                    f"layer {layer.layer!r} has left its budget: {candidate.recipe!r} "
                    f"has an error of {candidate.error:.3f}, above {self.budget:g}; "
                    f"now the choice would be {layer.chosen or 'float'} "
                    f"({layer.reason})",
                    stacklevel=2,
                )
        return left


def _row(layer: LayerReceipt) -> list[str]:
    stack = f"{layer.stack} x " if layer.stack > 1 else ""
    cells = [f"{c.errors.y:.3f}" for c in layer.candidates]
    if layer.float_ms is not None:
        for n, candidate in enumerate(layer.candidates):
            cells[n] += f", {layer.float_ms / (candidate.ms or math.nan):.2f}x"
    return [
        layer.layer,
        f"{stack}{', '.join(map(str, layer.sizes))}",
        f"{layer.outliers.largest:.0f} rms",
        f"{layer.outliers.share:.1%}",
        *cells,
        layer.chosen or "float",
        layer.reason,
    ]


def _read_layer(row: Any) -> LayerReceipt:
    layer, sizes, stack, found, candidates, *rest = row
    read = tuple(Candidate(name, Errors(*e), ms) for name, e, ms in candidates)
    return LayerReceipt(layer, tuple(sizes), stack, Outliers(*found), read, *rest)
