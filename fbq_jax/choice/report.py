"""The receipt of a choice: what was measured, what was chosen, and why."""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fbq_jax.kernels.speed_map import Sizes
from fbq_jax.recipes import NAMED
from fbq_jax.recipes.schema import Recipe

#: Gradients may have so many times the error of outputs: their rounding is stochastic,
#: so errors of many steps cancel.
GRADIENTS = 10.0


class Candidate(NamedTuple):
    """What a recipe would do to a layer.

    Attributes:
      recipe: its name.
      y: the error of Y, as in ``products.errors``; the largest one of a stack.
      dx: the error of dX.
      dw: the error of dW.
      ms: milliseconds of Y, dX and dW on this device, the mean of a layer's products;
        None if not measured.
    """

    recipe: str
    y: float
    dx: float
    dw: float
    ms: float | None = None

    @property
    def error(self) -> float:
        """What is compared with the budget."""
        each = [self.y, self.dx / GRADIENTS, self.dw / GRADIENTS]
        return math.nan if any(map(math.isnan, each)) else max(each)


class LayerReceipt(NamedTuple):
    """The choice for a layer, or for a stack of layers, which share a recipe.

    Attributes:
      layer: its path.
      sizes: M, K and N of its products in a step; M is the number of tokens.  There
        are several in a stack, and in a module that multiplies by several parameters.
      largest: the largest magnitude of X over its root mean square.
      outliers: the share of outlier blocks in X, as in ``products.outliers``.
      candidates: from fast to slow.
      chosen: the name of a candidate; None leaves the layer in float.
      reason: why.
      float_ms: as ``Candidate.ms``, in float.
    """

    layer: str
    sizes: tuple[Sizes, ...]
    largest: float
    outliers: float
    candidates: tuple[Candidate, ...]
    chosen: str | None
    reason: str
    float_ms: float | None = None

    def candidate(self, recipe: str | None) -> Candidate | None:
        """The candidate of this name."""
        return next((c for c in self.candidates if c.recipe == recipe), None)


@dataclass(frozen=True)
class ChoiceReport:
    """What ``choose_recipes`` measured and chose; ``print`` shows it as a table.

    Attributes:
      layers: the receipts, in the order of the layers' paths.
      budget: the largest error of a layer's output.
      device: what it was measured on.
      float_ms: milliseconds of the gradient of a step in float; None if not measured.
      chosen_ms: those with the chosen recipes; None if not measured.
      look: what ``check`` calls; None if the report was loaded.
    """

    layers: tuple[LayerReceipt, ...]
    budget: float
    device: str
    float_ms: float | None = None
    chosen_ms: float | None = None
    look: Callable[..., "ChoiceReport"] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def rules(self) -> dict[str, Recipe | None]:
        """The rules for ``quantize``, whose patterns are the paths of the layers."""
        return {
            re.escape(x.layer): NAMED[x.chosen] if x.chosen else None
            for x in self.layers
        }

    @property
    def predicted_ms(self) -> float | None:
        """``float_ms`` less what the chosen layers save; None if not measured."""
        ms = self.float_ms
        for layer in self.layers:
            chosen = layer.candidate(layer.chosen)
            if ms is not None and chosen and chosen.ms and layer.float_ms:
                ms -= len(layer.sizes) * (layer.float_ms - chosen.ms)
        return ms

    def __str__(self) -> str:
        names = [c.recipe for c in self.layers[0].candidates]
        head = ["layer", "M, K, N", "largest", "outliers", *names, "choice", "why"]
        rows = [head, *map(_row, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        saved = sum(M * K for x in self.layers if x.chosen for M, K, _ in x.sizes)
        lines.append(
            f"errors of Y, or a tenth of those of dX and dW, at most {self.budget:g}; "
            f"on {self.device}; layers save {saved / 2**20:,.1f} MiB of inputs, a byte "
            "a value"
        )
        if (base := self.float_ms) is not None:
            times = {"predicted": self.predicted_ms, "measured": self.chosen_ms}
            each = [
                f"{k} {ms:.2f} ms ({base / ms:.2f}x)" for k, ms in times.items() if ms
            ]
            lines.append(f"gradient: {base:.2f} ms in float, {', '.join(each)}")
        return "\n".join(lines)

    def draw(self) -> Any:
        """A figure of Matplotlib: each layer's error by candidate, and the budget."""
        from matplotlib.figure import Figure  # which nothing else here needs

        figure = Figure(figsize=(8, 1 + 0.3 * len(self.layers)), layout="constrained")
        axes, rows = figure.subplots(), range(len(self.layers))
        for n, (name, *_) in enumerate(self.layers[0].candidates):
            errors = [layer.candidates[n].error for layer in self.layers]
            chosen = [row for row in rows if self.layers[row].chosen == name]
            (points,) = axes.plot(errors, rows, "o", mfc="none", label=name)
            filled = [errors[row] for row in chosen]
            axes.plot(filled, chosen, "o", color=points.get_color())
        axes.axvline(self.budget, color="black", linewidth=1, label="budget")
        axes.set(
            xscale="log",
            xlabel="error of Y, or a tenth of the error of dX or dW (filled: chosen)",
        )
        axes.set_yticks(rows, [layer.layer or "(root)" for layer in self.layers])
        axes.invert_yaxis()
        axes.legend()
        return figure

    def save(self, file: Path | str) -> None:
        """Writes the report as JSON."""
        text = json.dumps(asdict(replace(self, look=None)), indent=1)
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

    def check(self, *arguments: Any) -> "ChoiceReport":
        """Looks again, and warns of each layer that has left its budget.

        Args:
          *arguments: those of ``choose_recipes`` before its options, with the present
            parameters and a new batch.  Keyword arguments are those that it had.  With
            the same shapes, nothing is compiled again.

        Returns:
          What would be chosen now, which can check, too.

        Raises:
          ValueError: the report was loaded.
        """
        if self.look is None:
            raise ValueError(
                "a loaded report has no model to check: call choose_recipes again, and "
                "check dataclasses.replace(new_report, layers=loaded.layers)"
            )
        now = replace(self.look(*arguments), look=self.look)
        chosen = {layer.layer: layer.chosen for layer in self.layers}
        for layer in now.layers:
            used = layer.candidate(chosen.get(layer.layer))
            if used is not None and not used.error <= self.budget:  # it may be NaN
                warnings.warn(
                    f"layer {layer.layer!r} has left its budget: {used.recipe!r} has "
                    f"an error of {used.error:.3f}, above {self.budget:g}; now the "
                    f"choice would be {layer.chosen or 'float'} ({layer.reason})",
                    stacklevel=2,
                )
        return now


def _row(layer: LayerReceipt) -> list[str]:
    cells = [f"{c.error:.3f}" for c in layer.candidates]
    if layer.float_ms is not None:
        for n, candidate in enumerate(layer.candidates):
            cells[n] += f", {layer.float_ms / (candidate.ms or math.nan):.2f}x"
    sizes = "; ".join(
        f"{count} x " * (count > 1) + ", ".join(map(str, each))
        for each, count in Counter(layer.sizes).items()
    )
    found = f"{layer.largest:.0f} rms", f"{layer.outliers:.1%}"
    name = layer.layer or "(root)"
    return [name, sizes, *found, *cells, layer.chosen or "float", layer.reason]


def _read_layer(row: Any) -> LayerReceipt:
    layer, sizes, largest, share, candidates, *rest = row
    read = tuple(Candidate(*candidate) for candidate in candidates)
    return LayerReceipt(layer, tuple(map(tuple, sizes)), largest, share, read, *rest)
