"""The pictures of the experiments about studies."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from examples.llama.experiments.result_files import Json
from examples.llama.experiments.studies import criteria, error, gradients
from examples.llama.experiments.studies.perplexity import BLOCK_SIDES
from examples.llama.plot import COLORS, Place, finish, style
from fbq_jax import recipes


def errors(models: dict[str, Json]) -> Figure:
    """The rms error of X by bits, with and without fallback."""

    def panel(axes: Axes, found: Json) -> None:
        for index, (name, of_name) in enumerate(found.items()):
            color = COLORS[index]
            axes.semilogy(error.PLAIN, of_name["plain"], label=name, color=color)
            axes.semilogy(error.FALLBACK, of_name["fallback"], "--", color=color)
        axes.set(xlabel="bits (dashed: with fallback)")

    return _panels(models, panel, "relative rms error of a token")


def output_distances(models: dict[str, Json]) -> Figure:
    """The error of the output of `down`, by fallback rate and criterion."""

    def panel(axes: Axes, found: Json) -> None:
        _draw_lines(axes, criteria.RATES, found["down"])
        _label_rates(axes)

    return _panels(models, panel, "1 - cosine of down's output")


def operands(models: dict[str, Json]) -> Figure:
    """The error of the gradient, by bits of each operand."""

    def panel(axes: Axes, found: Json) -> None:
        _draw_lines(axes, gradients.BITS, found)
        axes.set(xlabel="bits", yscale="log")

    return _panels(models, panel, "1 - cosine of the gradient")


def passes(models: dict[str, Json]) -> Figure:
    """The error of the gradient with fallback in the forward product, and in dW too."""

    def panel(axes: Axes, found: Json) -> None:
        # The results were measured under the name "W in floats".
        lines = {name.replace("floats", "float"): found[name] for name in found}
        _draw_lines(axes, gradients.RATES, lines)
        _label_rates(axes)

    return _panels(models, panel, "1 - cosine of the gradient", legend="best")


def nonlinear(models: dict[str, list[float]]) -> Figure:
    """The error of the gradient, by the bits that norms and gates save."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines = {_model_name(model): errors for model, errors in models.items()}
    _draw_lines(axes, gradients.SAVED_BITS, lines)
    axes.axvline(10, color="0.6", linestyle=":", zorder=0)
    axes.set(xlabel="bits saved per value", yscale="log")
    axes.set(ylabel="1 - cosine of the gradient")
    finish(axes)
    return figure


def perplexity(models: dict[str, Json]) -> Figure:
    """The perplexity by block size."""

    def panel(axes: Axes, found: Json) -> None:
        for index, kind in enumerate(("block", "fallback")):
            color = COLORS[index]
            axes.semilogx(BLOCK_SIDES, found[kind], "o-", label=kind, color=color)
        axes.axhline(found["float"], color="0.5", linestyle=":", label="float32")
        axes.minorticks_off()
        axes.set_xticks(BLOCK_SIDES, labels=list(map(str, BLOCK_SIDES)))
        axes.set(xlabel="block size")

    return _panels(models, panel, "perplexity", sharey=False, legend="upper left")


def blocks(models: dict[str, Json]) -> Figure:
    """The positions of the blocks that fall back, in the input of `down`."""
    layers = len(next(iter(models.values()))["down"])
    figure = Figure(figsize=(1.6 * layers + 1, 2 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), layers, squeeze=False)
    for row, (model, found) in zip(grid, models.items(), strict=True):
        for layer, (axes, lines) in enumerate(zip(row, found["down"], strict=True)):
            cells = np.array([[int(cell) for cell in line] for line in lines])
            axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, aspect="auto")
            axes.set(xticks=[], yticks=[], title=f"layer {layer}, {cells.mean():.0%}")
        row[0].set_ylabel(f"{_model_name(model)}\nblocks of tokens")
    figure.supxlabel("blocks of channels")
    return figure


def start(models: dict[str, Json]) -> Figure:
    """Thresholds and rates over the first training forwards, by start."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    thetas, rates = figure.subplots(1, 2)
    for index, (name, found) in enumerate(models["trained"].items()):
        forwards = 1 + np.arange(len(found["theta"]))
        label = "first batch" if name == "first_batch" else f"from {float(name):g}"
        thetas.plot(forwards, found["theta"], label=label, **style(index))
        rates.plot(forwards, found["rate"], **style(index))
    thetas.set(xlabel="training forward", ylabel="threshold / first batch's")
    thetas.set_yscale("log")
    rates.axhspan(*recipes.fallback.target_rate, color="0.87", zorder=0)
    rates.set(xlabel="training forward", ylabel="fallback rate")
    finish(thetas)
    finish(rates)
    return figure


def _model_name(model: str) -> str:
    return model if model == "trained" else f"planted {model}"


def _draw_lines(axes: Axes, x: Any, lines: dict[str, list[float]]) -> None:
    for index, (label, values) in enumerate(lines.items()):
        axes.plot(x, values, label=label, **style(index))


def _label_rates(axes: Axes) -> None:
    axes.set(xlabel="fallback rate", yscale="log")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _panels(
    models: dict[str, Json],
    panel: Callable[[Axes, Any], None],
    ylabel: str,
    *,
    sharey: bool = True,
    legend: Place = "upper right",
) -> Figure:
    """A figure with a panel for each model."""
    figure = Figure(figsize=(3.4 * len(models), 4), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=sharey, squeeze=False)[0]
    for axes, (model, found) in zip(panels, models.items(), strict=True):
        panel(axes, found)
        axes.set_title(_model_name(model))
        finish(axes, legend)
    panels[0].set_ylabel(ylabel)
    return figure
