"""The pictures of the experiments about training runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.llama.config import RECIPES
from examples.llama.experiments import result_files
from examples.llama.experiments.result_files import Json
from examples.llama.experiments.settings import FULL, QUARTER
from examples.llama.plot import finish, smooth, style
from fbq_jax import recipes

_RECIPES = list(dict.fromkeys([*FULL.tuned, *QUARTER.tuned, *RECIPES]))


def recipe_style(run: str) -> dict[str, Any]:
    """Returns the color and dashes of a recipe, or of a run, in all pictures."""
    recipe, _, seed = run.partition("-")
    line = style(_RECIPES.index(recipe))
    return line if seed in ("", "0") else line | {"linestyle": ":"}


def parity(runs: dict[str, Json]) -> Figure:
    """Losses over the steps, and their differences from bf16 with the same seed."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    losses.set(
        title="Training loss (circles: validation; dotted: other seeds)",
        ylabel="nats per token",
    )
    differences.set(
        title="Training loss minus bf16's, smoothed",
        xlabel="step",
        ylabel="nats per token",
    )
    for name, run in runs.items():
        line, loss = recipe_style(name), _floats(run["loss"])
        recipe, _, seed = name.partition("-")
        label = recipe if seed == "0" else None
        losses.plot(1 + np.arange(len(loss)), smooth(loss), label=label, **line)
        validated = [int(step) for step in run["val_loss"]]
        losses.plot(
            validated,
            _floats(list(run["val_loss"].values())),
            "o",
            color=line["color"],
            markersize=4,
        )
    for recipe, of_seeds in _paired_differences(runs).items():
        steps, mean = 1 + np.arange(of_seeds.shape[1]), of_seeds.mean(axis=0)
        line = recipe_style(recipe)
        differences.plot(steps, mean, **line)
        if len(of_seeds) > 1:
            error = of_seeds.std(axis=0, ddof=1) / np.sqrt(len(of_seeds))
            band = {"color": line["color"], "alpha": 0.2, "linewidth": 0}
            differences.fill_between(steps, mean - error, mean + error, **band)
    # Most differences are small, and a few are not.
    differences.set_yscale("symlog", linthresh=0.01)
    _crop_the_descent(losses, [_floats(run["loss"]) for run in runs.values()])
    finish(losses)
    finish(differences)
    return figure


def _paired_differences(runs: dict[str, Json]) -> dict[str, np.ndarray]:
    """Smoothed losses minus those of bf16 with the same seed, by recipe [seeds, steps].

    Another seed has other batches, so its difference would mean nothing.
    """
    found: dict[str, list[np.ndarray]] = {}
    for name, run in runs.items():
        recipe, _, seed = name.partition("-")
        if recipe == "bf16" or (base := runs.get(f"bf16-{seed}")) is None:
            continue
        shared = min(len(run["loss"]), len(base["loss"]))
        own, other = (_floats(of["loss"][:shared]) for of in (run, base))
        found.setdefault(recipe, []).append(smooth(own - other))
    shortest = {name: min(map(len, of)) for name, of in found.items()}
    return {n: np.stack([x[: shortest[n]] for x in of]) for n, of in found.items()}


def cost(runs: dict[str, Json]) -> Figure:
    """Loss over training time, tokens per second, and memory."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    over_time, speed, memory = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    over_time.set(
        title="Validation loss over time", xlabel="seconds", ylabel="nats per token"
    )
    labels = result_files.labels(runs)
    for name, run in runs.items():
        seconds_and_losses = result_files.losses_by_time(run)
        over_time.plot(*seconds_and_losses, label=labels[name], **recipe_style(name))
    names = list(labels.values())
    colors = [recipe_style(name)["color"] for name in runs]
    rates = [run["tokens_per_s"] / 1e3 for run in runs.values()]
    speed.barh(names, rates, color=colors)
    speed.set(title="Thousand tokens per second")
    peaks = [(run["peak_bytes"] or 0) / 1e9 for run in runs.values()]
    memory.barh(names, peaks, color=colors)
    memory.set(title="Peak memory, GB", yticklabels=[])
    for axes in (speed, memory):
        axes.invert_yaxis()
    for axes in (over_time, speed, memory):
        finish(axes)
    return figure


def outliers(runs: dict[str, Json]) -> Figure:
    """Validation loss after fine-tuning minus bf16's, by planted activation."""
    losses = result_files.losses_by_model(runs)
    # By size, then those that were planted elsewhere than in activations.
    models = sorted(losses.keys() - {"trained"}, key=lambda name: (len(name), name))
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    names = dict.fromkeys(recipe for model in models for recipe in losses[model])
    names.pop("bf16", None)
    lowest = 0.0
    for index, recipe in enumerate(names):
        # Recipes are side by side, so that none hides another.
        shift = (index - (len(names) - 1) / 2) * 0.8 / len(names)
        line, means = recipe_style(recipe), []
        for place, model in enumerate(models):
            values = result_files.differences_from_bf16(losses[model], recipe)
            means.append(values.mean() if len(values) else np.nan)
            lowest = np.nanmin([lowest, *values])
            places = np.full(len(values), place + shift)
            axes.plot(places, values, "o", markersize=4, color=line["color"])
        places = shift + np.arange(len(models))
        axes.plot(places, means, linewidth=1, label=recipe, **line)
    axes.set(
        title="After fine-tuning: validation loss minus bf16's of the same seed "
        "(circles: seeds)",
        xlabel="largest activation planted, or place of the outliers",
        ylabel="nats per token",
        xticks=range(len(models)),
        xticklabels=models,
    )
    # Linear around 0, because differences can be negative.
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=lowest)
    finish(axes, "lower right")
    return figure


def thresholds(runs: dict[str, Json]) -> Figure:
    """Threshold and fallback rate of each layer during training."""
    run = runs["fallback-0"]
    projections = run["fallback"]
    figure = Figure(figsize=(12, 6), layout="constrained")
    grid = figure.subplots(2, len(projections), sharex=True, squeeze=False)
    for column, (name, layers) in enumerate(projections.items()):
        for row, quantity in enumerate(("theta", "rate")):
            axes, values = grid[row, column], np.array(layers[quantity], float)
            colors = colormaps["viridis"](np.linspace(0, 0.9, values.shape[1]))
            for line, color in zip(values.T, colors, strict=True):
                axes.plot(run["looks"], line, color=color, linewidth=1)
            if quantity == "theta":
                axes.set(title=result_files.projection(name), yscale="log")
            else:
                axes.set(xlabel="step", ylim=(0, None))
                axes.axhspan(*recipes.fallback.target_rate, color="0.87", zorder=0)
            finish(axes)
    grid[0, 0].set_ylabel("threshold")
    grid[1, 0].set_ylabel("fallback rate")
    figure.suptitle("One line per layer, from dark (first) to light (last)")
    return figure


def longer(runs: dict[str, Json]) -> Figure:
    """Training losses without clipping, in one plot for each learning rate."""
    lrs = sorted({run["options"]["lr"] for run in runs.values()})
    figure = Figure(figsize=(10, 1 + 4 * len(lrs)), layout="constrained")
    for axes, lr in zip(
        figure.subplots(len(lrs), squeeze=False)[:, 0], lrs, strict=True
    ):
        losses = {
            run["options"]["recipe"]: smooth(_floats(run["loss"]))
            for run in runs.values()
            if run["options"]["lr"] == lr
        }
        for name, loss in losses.items():
            axes.plot(1 + np.arange(len(loss)), loss, label=name, **recipe_style(name))
        axes.set(
            title=f"Training loss at a learning rate of {lr:g}, smoothed",
            xlabel="step",
            ylabel="nats per token",
        )
        _crop_the_descent(axes, losses.values())
        finish(axes, "lower left")
    return figure


def _crop_the_descent(axes: Axes, losses: Iterable[np.ndarray]) -> None:
    """Limits the axes to the losses after the first tenth of the steps."""
    shown = np.concatenate([loss[len(loss) // 10 :] for loss in losses])
    if np.any(finite := np.isfinite(shown)):
        axes.set_ylim(*np.quantile(shown[finite], (0, 0.999)))


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """Converts values from JSON, where null stands for a value that is not finite."""
    return np.array(values, np.float64)
