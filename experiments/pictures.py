"""The pictures of the experiments, each from a folder of results; None without them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.llama.plot import finish, loss_panels, smooth, style
from experiments import result_files
from experiments.result_files import Json
from experiments.settings import RECIPES, TRAINED
from experiments.studies import CURVES
from experiments.tables import models_to_show
from fbq_jax import recipes


def recipe_style(run: str) -> dict[str, Any]:
    """Returns the color and dashes of a recipe, or of a run, in all pictures."""
    recipe, _, seed = run.partition("-")
    line = style(RECIPES.index(recipe))
    return line if seed in ("", "0") else line | {"linestyle": ":"}


def losses(results: Path) -> Figure | None:
    """Losses over the steps, and their differences from bf16 with the same seed."""
    runs = result_files.runs(results, "parity")
    if not runs:
        return None
    title = "Training loss (circles: validation; dotted: other seeds)"
    figure, above, differences = loss_panels(title, "bf16")
    for name, run in runs.items():
        line, (recipe, _, seed) = recipe_style(name), name.partition("-")
        label = recipe if seed == "0" else None
        _draw_loss(above, run, label=label, **line)
        validated = [int(step) for step in run["val_loss"]]
        values = _floats(list(run["val_loss"].values()))
        above.plot(validated, values, "o", color=line["color"], markersize=4)
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
    _crop_the_descent(above, runs.values())
    finish(above)
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


def outliers_by_layer(results: Path) -> Figure | None:
    """What stands out in the inputs of a trained model's projections."""
    rows = result_files.one(results, "outliers").get("rows", [])
    if not rows:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {
        "largest": "largest magnitude / root mean square",
        "share": "share of 128x128 blocks with outliers",
    }
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for i, what in enumerate(dict.fromkeys(row["what"] for row in rows)):
            of = [row for row in rows if row["what"] == what]
            layers = [row["layer"] for row in of]
            axes.plot(layers, [row[key] for row in of], label=what, **style(i))
        axes.set(title=title, xlabel="layer")
        axes.grid(alpha=0.3)
    figure.axes[0].set_yscale("log")
    finish(figure.axes[0])
    return figure


def outliers(results: Path) -> Figure | None:
    """Validation loss after fine-tuning minus bf16's, by planted activation."""
    losses = result_files.losses_by_model(result_files.runs(results, "outliers"))
    if not losses:
        return None
    # By size, then those that were planted elsewhere than in activations.
    models = sorted(losses.keys() - {TRAINED}, key=lambda name: (len(name), name))
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    names = dict.fromkeys(recipe for model in models for recipe in losses[model])
    names.pop("bf16", None)
    lowest = 0.0
    for index, recipe in enumerate(names):
        # Recipes are side by side, so that none hides another.
        shift = (index - (len(names) - 1) / 2) * 0.8 / len(names)
        line = recipe_style(recipe)
        for place, model in enumerate(models):
            values = result_files.differences_from_bf16(losses[model], recipe)
            lowest = np.nanmin([lowest, *values])
            places = np.full(len(values), place + shift)
            label = recipe if place == 0 else None
            axes.plot(places, values, "o", label=label, color=line["color"])
    axes.set(
        title="After fine-tuning: validation loss minus bf16's of the same seed",
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


def thresholds(results: Path) -> Figure | None:
    """Threshold and fallback rate of each layer during training."""
    run = result_files.one(results, "parity/fallback-0")
    if not run:
        return None
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
                title = name.removeprefix("layers/").removesuffix("/dense")
                axes.set(title=title, yscale="log")
            else:
                axes.set(xlabel="step", ylim=(0, None))
                axes.axhspan(*recipes.fallback.target_rate, color="0.87", zorder=0)
            finish(axes)
    grid[0, 0].set_ylabel("threshold")
    grid[1, 0].set_ylabel("fallback rate")
    figure.suptitle("One line per layer, from dark (first) to light (last)")
    return figure


def longer(results: Path) -> Figure | None:
    """Training losses without clipping, in one plot for each learning rate."""
    by_lr: dict[float, list[Json]] = {}
    for run in result_files.runs(results, "longer").values():
        by_lr.setdefault(run["options"]["lr"], []).append(run)
    if not by_lr:
        return None
    figure = Figure(figsize=(10, 1 + 4 * len(by_lr)), layout="constrained")
    panels = figure.subplots(len(by_lr), squeeze=False)[:, 0]
    for axes, lr in zip(panels, sorted(by_lr), strict=True):
        for run in by_lr[lr]:
            name = run["options"]["recipe"]
            _draw_loss(axes, run, label=name, **recipe_style(name))
        axes.set(
            title=f"Training loss at a learning rate of {lr:g}, smoothed",
            xlabel="step",
            ylabel="nats per token",
        )
        _crop_the_descent(axes, by_lr[lr])
        finish(axes, "lower left")
    return figure


def _draw_loss(axes: Axes, run: Json, **line: Any) -> None:
    loss = _floats(run["loss"])
    axes.plot(1 + np.arange(len(loss)), smooth(loss), **line)


def _crop_the_descent(axes: Axes, runs: Iterable[Json]) -> None:
    """Limits the axes to the losses after the first tenth of the steps."""
    losses = [_floats(run["loss"]) for run in runs]
    shown = np.concatenate([loss[len(loss) // 10 :] for loss in losses])
    if np.any(finite := np.isfinite(shown)):
        axes.set_ylim(*np.quantile(shown[finite], (0, 0.999)))


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """Converts values from JSON, where null stands for a value that is not finite."""
    return np.array(values, np.float64)


def curves(results: Path, name: str) -> Figure | None:
    """The curves of a study, in a panel for each model."""
    shown, models = CURVES[name], models_to_show(results, name)
    if not models:
        return None
    figure = Figure(figsize=(3.4 * len(models), 4), layout="constrained")
    is_log = shown.form.endswith("e")
    panels = figure.subplots(1, len(models), sharey=is_log, squeeze=False)[0]
    for axes, (model, found) in zip(panels, models.items(), strict=True):
        for index, (label, values) in enumerate(shown.of(found).items()):
            axes.plot(shown.x[: len(values)], values, label=label, **style(index))
        title = model if model == TRAINED else f"planted {model}"
        axes.set(title=title, xlabel=shown.xlabel)
        if is_log:
            axes.set_yscale("log")
        finish(axes, "best")
    panels[0].set_ylabel(shown.ylabel)
    return figure
