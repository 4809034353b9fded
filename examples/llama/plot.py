"""Plots of runs: losses, fallback rates and experts, and recipes compared."""

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from examples.llama import atomic, metrics
from fbq_jax import Recipe

# The palette of Okabe and Ito, with gray in place of yellow, and seven others.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#000000", "#999999", "#661177", "#8C6D1F", "#332288"),
    *("#DDCC77", "#44AA99"),
)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

Place = Literal["upper left", "upper right", "lower left", "lower right", "best"]
Records = list[dict[str, Any]]


def draw_curves(run: Path, recipe: Recipe | None) -> None:
    """Draws `curves.png` from the `metrics.jsonl` of a run; None is bf16 or FP8.

    The top shows the losses, a row below the fallback rate of every layer and the
    target range, and the last row how unequal the load of experts is over the steps,
    and the load and fallback rates of each expert in each layer at the end.
    """
    records = metrics.read(run / "metrics.jsonl")
    loads = [record for record in records if "expert_load" in record]
    target = None if recipe is None or not recipe.criterion else recipe.target_rate
    rows = 1 + (target is not None) + bool(loads)
    figure = Figure(figsize=(10, 1 + 3 * rows), layout="constrained")
    above, *below = figure.subfigures(rows, 1, squeeze=False, hspace=0.04)[:, 0]
    if target is not None:
        _draw_rates(below[0], records, target)
    if loads:
        _draw_experts(below[-1], loads)
    axes = above.subplots()
    axes.set(title=f"Loss ({run.name})", xlabel="step", ylabel="nats per token")
    _draw_loss(axes, records, label="training", color=COLORS[0])
    _draw_validation(axes, run, label="validation", color=COLORS[1])
    finish(axes)
    save(figure, run / "curves.png")


def draw_comparison(runs: list[Path], path: Path) -> None:
    """Draws the losses of equally long runs, and their differences from the first."""
    summaries = [metrics.summarize(run) for run in runs]
    final, mean = [run.loss for run in summaries], metrics.describe_mean(summaries[0])
    title = f"Loss (legend: {mean}; circles: validation)"
    figure, losses, differences = loss_panels(title, runs[0].name)
    baseline: dict[int, float | None] = {}
    for index, run in enumerate(runs):
        records, line = metrics.read(run / "metrics.jsonl"), style(index)
        label = f"{run.name} {final[index]:.4f}"
        if index:
            label += f" ({final[index] - final[0]:+.4f})"
        else:
            baseline = {record["step"]: record.get("loss") for record in records}
        _draw_loss(losses, records, label=label, **line)
        _draw_validation(losses, run, color=line["color"])
        shared = [record for record in records if record["step"] in baseline]
        exact = np.array([baseline[record["step"]] for record in shared], np.float64)
        difference = smooth(_column(shared, "loss") - exact)
        differences.plot(_column(shared, "step"), difference, **line)
    finish(losses)
    finish(differences)
    save(figure, path)


def loss_panels(title: str, baseline: str) -> tuple[Figure, Axes, Axes]:
    """Returns a figure with axes for losses, and for differences from a run's."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    losses.set(title=title, ylabel="nats per token")
    title = f"Training loss minus {baseline}'s, smoothed"
    differences.set(title=title, xlabel="step", ylabel="nats per token")
    return figure, losses, differences


def _draw_loss(axes: Axes, records: Records, **line: Any) -> None:
    steps, loss = _column(records, "step"), _column(records, "loss")
    axes.plot(steps, loss, color=line["color"], linewidth=0.7, alpha=0.3)
    axes.plot(steps, smooth(loss), **line)


def _draw_validation(axes: Axes, run: Path, **line: Any) -> None:
    records = metrics.read(run / "metrics.jsonl", first=0)
    records = [record for record in records if "val_loss" in record]
    steps, loss = _column(records, "step"), _column(records, "val_loss")
    axes.plot(steps, loss, "o", markeredgecolor="white", markersize=7, **line)


def _draw_rates(
    figure: SubFigure, records: Records, target: tuple[float, float]
) -> None:
    records = [record for record in records if record.get("fallback")]
    if not records:
        return
    steps, rates = _column(records, "step"), [record["fallback"] for record in records]
    panels = figure.subplots(1, len(rates[0]), sharey=True, squeeze=False)[0]
    for panel, projection in zip(panels, rates[0], strict=True):
        panel.axhspan(*target, color="0.87", zorder=0)
        layers = np.array([rate[projection]["rate"] for rate in rates], np.float64)
        colors = _draw_layers(panel, steps, layers.reshape(len(records), -1))
        panel.set(title=projection.removeprefix("layers/"))
    panels[0].set(ylabel="fallback rate", ylim=(0, None))
    panels[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    shaded = "target, {:.0%} to {:.0%}".format(*target)
    figure.suptitle(f"Fallback rate, smoothed (shaded: {shaded})")
    norm = Normalize(-0.5, len(colors) - 0.5)
    scale = ScalarMappable(norm, ListedColormap(colors))
    ticks = MaxNLocator(8, integer=True)
    figure.colorbar(scale, ax=panels, label="layer", ticks=ticks)


def _draw_layers(panel: Axes, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Draws a curve for each layer from values [steps, layers]; returns the colors."""
    colors = colormaps["viridis"](np.linspace(0, 0.9, values.shape[1]))
    for layer, color in zip(values.T, colors, strict=True):
        panel.plot(steps, smooth(layer), color=color, linewidth=1)
    panel.set(xlabel="step")
    panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    finish(panel)
    return colors


def _draw_experts(figure: SubFigure, records: Records) -> None:
    loads = np.array([record["expert_load"] for record in records], np.float64)
    steps = _column(records, "step")
    relative = loads / np.maximum(loads.mean(axis=-1, keepdims=True), 1)
    records = records[-max(1, len(records) // 20) :]
    load = relative[-len(records) :].mean(axis=0)
    layers = records[-1].get("fallback", {}).items()
    found = [name for name, layer in layers if "expert_rates" in layer]
    busiest, *panels = figure.subplots(1, 2 + len(found))
    _draw_layers(busiest, steps, relative.max(axis=-1))
    busiest.set(title="largest load / mean", ylim=(1, None))
    # White is the mean of the layer.
    norm = TwoSlopeNorm(1, 0, max(2, load.max()))
    maps: list[Any] = [("load / mean", load, "RdBu_r", norm)]
    for name in found:
        title = f"fallback rate, {name.rpartition('/')[2]}"
        rates = [record["fallback"][name]["expert_rates"] for record in records]
        mean = np.array(rates, np.float64).mean(axis=0)
        maps.append((title, mean, "viridis", Normalize(0, 1)))
    for panel, (title, values, colors, norm) in zip(panels, maps, strict=True):
        image = panel.imshow(
            values, aspect="auto", cmap=colors, norm=norm, interpolation="none"
        )
        for axis in panel.xaxis, panel.yaxis:
            axis.set_major_locator(MaxNLocator(5, integer=True))
        panel.set(title=title, xlabel="expert")
        bar = panel.figure.colorbar(image, ax=panel)
        if values is not load:
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panels[0].set(ylabel="layer")
    maps_show = "means over the last twentieth of the steps"
    figure.suptitle(f"Experts (left: of each layer, smoothed; maps: {maps_show})")


def style(index: int) -> dict[str, Any]:
    """Returns the color and the dashes of a curve; the first 50 styles differ."""
    cycle, color = divmod(index, len(COLORS))
    # A color has other dashes in each cycle.
    dashes = DASHES[(color + cycle) % len(DASHES)]
    return {"color": COLORS[color], "linestyle": dashes}


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns centered means over windows of up to a twentieth of the steps."""
    steps, reach = np.arange(len(values)), len(values) // 40
    # Windows stay symmetric at the start, where the loss falls steeply.
    start = np.maximum(steps - reach, 0)
    end = np.minimum(np.minimum(steps + reach, 2 * steps), len(values) - 1) + 1
    sums = np.cumsum(np.pad(values, (1, 0)))
    return (sums[end] - sums[start]) / (end - start)


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """The values of a metric, float64 [records]; NaN where a record has none."""
    return np.array([record.get(name) for record in records], np.float64)


def finish(axes: Axes, legend: Place = "upper right") -> None:
    """Applies the common style to axes, and a legend if curves have labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if lines := axes.get_legend_handles_labels()[0]:
        columns = -(-len(lines) // 8)  # a taller legend would cover the curves
        axes.legend(loc=legend, frameon=False, ncols=columns)


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file; raises the errors of `atomic.write`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    atomic.write(path, picture.getvalue())
