"""The pictures of EXPERIMENTS.md, each from the JSON of its results alone."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from examples.llama.config import RECIPES
from examples.llama.experiments import found
from examples.llama.experiments.found import Json
from examples.llama.experiments.parity import ORDER
from examples.llama.experiments.studies import criteria, error, gradients
from examples.llama.plot import COLORS, Place, finish, save, smooth, style
from fbq_jax import recipes
from fbq_jax.recipes.schema import BLOCK_SIDES

TARGET = recipes.fallback.target_rate
_RECIPES = list(dict.fromkeys([*(recipe for recipe, _ in ORDER), *RECIPES]))


def draw(results: Path) -> list[str]:
    """Draws what there are results of; returns the pictures' names."""
    drawn = []
    for name, (read, make) in PICTURES.items():
        if data := read(results):
            figure = make(data)
            save(figure, results / f"{name}.png")
            drawn.append(name)
    return drawn


def recipe_style(run: str) -> dict[str, Any]:
    """The color and the dashes of a recipe, or of a run of it, in every picture."""
    recipe, _, seed = run.partition("-")
    of_recipe = style(_RECIPES.index(recipe))
    return of_recipe if seed in ("", "0") else of_recipe | {"linestyle": ":"}


def parity(runs: dict[str, Json]) -> Figure:
    """Loss over steps, and how far each is from bf16's."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    losses.set(title="Training loss (circles: validation)", ylabel="nats a token")
    differences.set(
        title="Training loss minus that of bf16, smoothed",
        xlabel="step",
        ylabel="nats a token",
    )
    baseline = _floats(runs["bf16-0"]["loss"]) if "bf16-0" in runs else None
    for name, run in runs.items():
        line, loss = recipe_style(name), _floats(run["loss"])
        steps = 1 + np.arange(len(loss))
        losses.plot(steps, smooth(loss), label=name, **line)
        validated = [int(step) for step in run["val_loss"]]
        losses.plot(
            validated,
            _floats(list(run["val_loss"].values())),
            "o",
            color=line["color"],
            markersize=4,
        )
        # Of another seed the batches are others, and a difference means nothing.
        if baseline is not None and name.endswith("-0") and name != "bf16-0":
            shared = min(len(loss), len(baseline))
            difference = smooth(loss[:shared] - baseline[:shared])
            differences.plot(steps[:shared], difference, **line)
    # Most are close to bf16, and some are not.
    differences.set_yscale("symlog", linthresh=0.01)
    _leave_out_the_descent(losses, [_floats(run["loss"]) for run in runs.values()])
    finish(losses)
    finish(differences)
    return figure


def cost(runs: dict[str, Json]) -> Figure:
    """Loss against the time of the steps; tokens a second; memory."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    over_time, speed, memory = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    over_time.set(
        title="Validation loss over time", xlabel="seconds", ylabel="nats a token"
    )
    for name, run in runs.items():
        over_time.plot(*found.losses_by_time(run), label=name, **recipe_style(name))
    names, colors = list(runs), [recipe_style(name)["color"] for name in runs]
    rates = [run["tokens_per_s"] / 1e3 for run in runs.values()]
    speed.barh(names, rates, color=colors)
    speed.set(title="Thousand tokens a second")
    peaks = [(run["peak_bytes"] or 0) / 1e9 for run in runs.values()]
    memory.barh(names, peaks, color=colors)
    memory.set(title="Peak memory, GB", yticklabels=[])
    for axes in (speed, memory):
        axes.invert_yaxis()
    for axes in (over_time, speed, memory):
        finish(axes)
    return figure


def outliers(runs: dict[str, Json]) -> Figure:
    """Validation loss after fine-tuning, minus bf16's, by the largest activation."""
    of = found.by_model_and_recipe(runs)
    models = sorted(of.keys() - {"trained"}, key=int)
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    names = dict.fromkeys(recipe for model in models for recipe in of[model])
    names.pop("bf16", None)
    lowest = 0.0
    for index, recipe in enumerate(names):
        # Side by side, lest they hide each other.
        shift = (index - (len(names) - 1) / 2) * 0.8 / len(names)
        line, means = recipe_style(recipe), []
        for place, model in enumerate(models):
            differences = found.to_bf16(of[model], recipe)
            means.append(differences.mean() if len(differences) else np.nan)
            lowest = np.nanmin([lowest, *differences])
            places = np.full(len(differences), place + shift)
            axes.plot(places, differences, "o", markersize=4, color=line["color"])
        places = shift + np.arange(len(models))
        axes.plot(places, means, linewidth=1, label=recipe, **line)
    axes.set(
        title="After fine-tuning: validation loss minus bf16's of the same seed "
        "(circles: seeds)",
        xlabel="largest activation planted",
        ylabel="nats a token",
        xticks=range(len(models)),
        xticklabels=models,
    )
    # Linear around 0, where logarithms have no place for what is below bf16.
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(bottom=lowest)
    finish(axes, "lower right")
    return figure


def error_by_bits(models: dict[str, Json]) -> Figure:
    """The rms error of X by bits, plain and with fallback."""

    def panel(axes: Axes, of: Json) -> None:
        for index, (name, errors) in enumerate(of.items()):
            color = COLORS[index]
            axes.semilogy(error.PLAIN, errors["plain"], label=name, color=color)
            axes.semilogy(error.FALLBACK, errors["fallback"], "--", color=color)
        axes.set(xlabel="bits (dashed: with fallback)")

    return _panels(models, panel, "relative rms error of a token")


def distance_by_rate(models: dict[str, Json]) -> Figure:
    """1 - cosine of `down`'s output and the exact one, by rate and criterion."""

    def panel(axes: Axes, of: Json) -> None:
        for index, (criterion, distances) in enumerate(of["down"].items()):
            axes.plot(criteria.RATES, distances, label=criterion, **style(index))
        axes.set(xlabel="blocks that fall back", yscale="log")
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    return _panels(models, panel, "1 - cosine of down's output")


def gradient_by_bits(models: dict[str, Json]) -> Figure:
    """1 - cosine of the gradient and the exact one, by bits of each operand."""

    def panel(axes: Axes, of: Json) -> None:
        for index, (operand, distances) in enumerate(of.items()):
            axes.plot(gradients.BITS, distances, label=operand, **style(index))
        axes.set(xlabel="bits", yscale="log")

    return _panels(models, panel, "1 - cosine of the gradient")


def passes(models: dict[str, Json]) -> Figure:
    """Fallback in the forward product only, and in dW too."""

    def panel(axes: Axes, of: Json) -> None:
        for index, (where, distances) in enumerate(of.items()):
            axes.plot(gradients.RATES, distances, label=where, **style(index))
        axes.set(xlabel="blocks that fall back", yscale="log")
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    return _panels(models, panel, "1 - cosine of the gradient", legend="best")


def nonlinear(models: dict[str, list[float]]) -> Figure:
    """1 - cosine of the gradient, by the bits that norms and gates keep."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for index, (model, distances) in enumerate(models.items()):
        axes.plot(gradients.SAVED_BITS, distances, label=model, **style(index))
    axes.axvline(10, color="0.6", linestyle=":", zorder=0)
    axes.set(xlabel="bits kept of a value", yscale="log")
    axes.set(ylabel="1 - cosine of the gradient")
    finish(axes)
    return figure


def perplexity(models: dict[str, Json]) -> Figure:
    """Perplexity by the size of a block."""

    def panel(axes: Axes, of: Json) -> None:
        for index, kind in enumerate(("block", "fallback")):
            axes.semilogx(BLOCK_SIDES, of[kind], "o-", label=kind, color=COLORS[index])
        axes.axhline(of["float"], color="0.5", linestyle=":", label="float32")
        axes.minorticks_off()
        axes.set_xticks(BLOCK_SIDES, labels=list(map(str, BLOCK_SIDES)))
        axes.set(xlabel="side of a block")

    return _panels(models, panel, "perplexity", sharey=False, legend="upper left")


def blocks(models: dict[str, Json]) -> Figure:
    """Where the blocks lie that fall back, in the input of `down`."""
    layers = len(next(iter(models.values()))["down"])
    figure = Figure(figsize=(1.6 * layers + 1, 2 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), layers, squeeze=False)
    for row, (model, of) in zip(grid, models.items(), strict=True):
        for layer, (axes, lines) in enumerate(zip(row, of["down"], strict=True)):
            cells = np.array([[int(cell) for cell in line] for line in lines])
            axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, aspect="auto")
            axes.set(xticks=[], yticks=[], title=f"layer {layer}, {cells.mean():.0%}")
        row[0].set_ylabel(f"{model}\nblocks of tokens")
    figure.supxlabel("blocks of channels")
    return figure


def thresholds(runs: dict[str, Json]) -> Figure:
    """Theta and the rate of each layer over the training with fallback."""
    run = runs["fallback-0"]
    projections = run["fallback"]
    figure = Figure(figsize=(12, 6), layout="constrained")
    grid = figure.subplots(2, len(projections), sharex=True, squeeze=False)
    for column, (name, of) in enumerate(projections.items()):
        for row, quantity in enumerate(("theta", "rate")):
            axes, values = grid[row, column], np.array(of[quantity], float)
            colors = colormaps["viridis"](np.linspace(0, 0.9, values.shape[1]))
            for line, color in zip(values.T, colors, strict=True):
                axes.plot(run["looks"], line, color=color, linewidth=1)
            if quantity == "theta":
                axes.set(title=found.projection(name), yscale="log")
            else:
                axes.set(xlabel="step", ylim=(0, None))
                axes.axhspan(*TARGET, color="0.87", zorder=0)
            finish(axes)
    grid[0, 0].set_ylabel("threshold")
    grid[1, 0].set_ylabel("blocks that fall back")
    figure.suptitle("One line a layer, from dark, the first, to light")
    return figure


def start(models: dict[str, Json]) -> Figure:
    """How the threshold finds its range."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    thetas, rates = figure.subplots(1, 2)
    for index, (name, of) in enumerate(models["trained"].items()):
        forwards = 1 + np.arange(len(of["theta"]))
        label = "first batch" if name == "first_batch" else f"{name} of it"
        thetas.plot(forwards, of["theta"], label=label, **style(index))
        rates.plot(forwards, of["rate"], **style(index))
    thetas.set(xlabel="training forward", ylabel="threshold / first batch's")
    thetas.set_yscale("log")
    rates.axhspan(*TARGET, color="0.87", zorder=0)
    rates.set(xlabel="training forward", ylabel="blocks that fall back")
    finish(thetas)
    finish(rates)
    return figure


def longer(runs: dict[str, Json]) -> Figure:
    """Training loss at a high learning rate with nothing clipped."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    losses = {name: smooth(_floats(run["loss"])) for name, run in runs.items()}
    for name, loss in losses.items():
        axes.plot(1 + np.arange(len(loss)), loss, label=name, **recipe_style(name))
    axes.set(title="Training loss, smoothed", xlabel="step", ylabel="nats a token")
    _leave_out_the_descent(axes, losses.values())
    finish(axes)
    return figure


def _panels(
    models: dict[str, Json],
    panel: Callable[[Axes, Any], None],
    ylabel: str,
    *,
    sharey: bool = True,
    legend: Place = "upper right",
) -> Figure:
    """A panel a model."""
    figure = Figure(figsize=(3.4 * len(models), 4), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=sharey, squeeze=False)[0]
    for axes, (model, of) in zip(panels, models.items(), strict=True):
        panel(axes, of)
        axes.set_title("trained" if model == "trained" else f"planted {model}")
        finish(axes, legend)
    panels[0].set_ylabel(ylabel)
    return figure


def _leave_out_the_descent(axes: Axes, losses: Iterable[np.ndarray]) -> None:
    """Has the axes show losses from where the steepest descent is over."""
    shown = np.concatenate([loss[len(loss) // 10 :] for loss in losses])
    if np.any(finite := np.isfinite(shown)):
        axes.set_ylim(*np.quantile(shown[finite], (0, 0.999)))


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """None, which JSON has for what is not finite, as NaN."""
    return np.array(values, np.float64)


def _study(name: str) -> Callable[[Path], Json]:
    return lambda results: found.study(results, name)


def _runs(stage: str) -> Callable[[Path], Json]:
    return lambda results: found.runs(results, stage)


def _with_fallback(results: Path) -> Json:
    runs = found.runs(results, "parity")
    return runs if "fallback-0" in runs else {}


# By name: what reads its results, nothing if there are none, and what draws them.
PICTURES: dict[str, tuple[Callable[[Path], Json], Callable[[Any], Figure]]] = {
    "parity": (_runs("parity"), parity),
    "cost": (_runs("parity"), cost),
    "thresholds": (_with_fallback, thresholds),
    "outliers": (_runs("outliers"), outliers),
    "error": (_study("error"), error_by_bits),
    "criteria": (_study("criteria"), distance_by_rate),
    "operands": (_study("operands"), gradient_by_bits),
    "passes": (_study("passes"), passes),
    "nonlinear": (_study("nonlinear"), nonlinear),
    "perplexity": (_study("perplexity"), perplexity),
    "blocks": (_study("blocks"), blocks),
    "start": (_study("start"), start),
    "longer": (_runs("longer"), longer),
}
