"""The tables of EXPERIMENTS.md, from the JSON of the results alone.

The page is prose with places for tables, `<!-- name -->` to `<!-- end -->`, which are
filled anew each time.
"""

import math
import os
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama.experiments import found
from examples.llama.experiments.studies import criteria, error, gradients
from fbq_jax import recipes
from fbq_jax.recipes.schema import BLOCK_SIDES

NOT_RUN = "*Not run yet.*"
# A run diverges where its loss, averaged over so many steps, rises so far above its
# lowest.
_AVERAGED, _RISE = 50, 0.5
_LOW, _HIGH = recipes.fallback.target_rate


def fill(page: Path, results: Path) -> None:
    """Writes each table, and the picture of its name if there is one, into the page.

    Where there is no such file, it is of tables and pictures alone.

    Raises:
        ResultsError: The page has a place for a table that is unknown.
    """

    def place(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise found.ResultsError(
                f"{page} has a place for {name}; there are {', '.join(TABLES)}"
            )
        content = TABLES[name](results) or NOT_RUN
        if (results / f"{name}.png").exists():
            folder = os.path.relpath(results, page.parent)
            content += f"\n\n![{name}]({folder}/{name}.png)"
        return f"<!-- {name} -->\n\n{content}\n\n<!-- end -->"

    text = page.read_text() if page.exists() else _empty()
    places = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
    page.parent.mkdir(parents=True, exist_ok=True)
    part = page.with_suffix(".part")
    part.write_text(places.sub(place, text))
    part.replace(page)


def _empty() -> str:
    """A page with a place for each table, and nothing else."""
    places = (f"## {name}\n\n<!-- {name} -->\n\n<!-- end -->\n" for name in TABLES)
    return "# Experiments\n\n" + "\n".join(places)


def parity(results: Path) -> str:
    """Final validation losses, how far from bf16's, and the cost."""
    runs = found.runs(results, "parity")
    if not runs:
        return ""
    # Only losses after all steps can be compared.
    ended = {name: found.last_val_loss(run) for name, run in _ended(runs).items()}
    base = ended.get("bf16-0", math.nan)
    rows = []
    for name, run in runs.items():
        loss, peak = found.last_val_loss(run), run["peak_bytes"]
        # Of the same seed, and so on the same batches.
        paired = name in ended and name.endswith("-0") and "bf16-0" in ended
        how = "diverged" if "diverged" in run else "stopped"
        difference = ended.get(name, math.nan) - base
        compared = not math.isnan(difference)
        rows.append(
            [
                name + ("" if name in ended else f" ({how} at step {run['steps']})"),
                f"{loss:.4f}",
                f"{difference:+.4f}" if compared else "",
                f"{difference / base:+.2%}" if compared else "",
                f"{_late(run) / _late(runs['bf16-0']) - 1:+.2%}" if paired else "",
                f"{run['tokens_per_s']:,.0f}",
                "" if peak is None else f"{peak / 1e9:.1f}",
            ]
        )
    head = (
        "recipe and seed",
        *("validation loss", "to bf16-0", "", "training loss to bf16-0"),
        *("tokens/s", "peak GB"),
    )
    run = next(iter(runs.values()))
    options, corpus = run["options"], run["options"]["corpus"]
    tokens = options["steps"] * options["batch"] * options["seq"]
    machine = ", ".join(f"{name} {of}" for name, of in run["machine"].items())
    about = (
        f"{tokens / 1e6:.1f} million tokens a run, {tokens / corpus['train']:.2f} "
        f"epochs of {corpus['train'] / 1e6:.1f} million; {machine}."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _ended(runs: dict[str, found.Json]) -> dict[str, found.Json]:
    """The runs that took all of their steps."""
    return {n: run for n, run in runs.items() if run["done"] and "diverged" not in run}


def _late(run: found.Json) -> float:
    """The mean training loss of the last tenth of the steps."""
    return statistics.fmean(run["loss"][-max(1, run["steps"] // 10) :])


def cost(results: Path) -> str:
    """Time and memory of the runs that ended, and when each reached a common loss."""
    runs = _ended(found.runs(results, "parity"))
    if "bf16-0" not in runs:
        return ""
    base = runs["bf16-0"]
    reached = max(map(found.last_val_loss, runs.values()))
    rows = []
    for name, run in runs.items():
        seconds, losses = found.losses_by_time(run)
        # The lowest so far, turned around: `interp` wants what does not fall.
        when = float(np.interp(-reached, -np.minimum.accumulate(losses), seconds))
        peaks = run["peak_bytes"], base["peak_bytes"]
        rows.append(
            [
                name,
                f"{seconds[-1]:.0f}",
                f"{run['tokens_per_s'] / base['tokens_per_s']:.2f}",
                f"{when:.0f}",
                "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}",
            ]
        )
    speed, memory = "speed, / bf16-0", "peak memory, / bf16-0"
    return _table(
        ("recipe and seed", "seconds", speed, f"seconds to {reached:.4f}", memory), rows
    )


def outliers(results: Path) -> str:
    """Losses of bf16 and what others add to them: means, and half the ranges."""
    of = found.by_model_and_recipe(found.runs(results, "outliers"))
    planted = found.one(results, "planted")
    if not of or not planted:
        return ""
    models = [model for model in planted if model in of]
    recipes = list(dict.fromkeys(recipe for model in models for recipe in of[model]))

    def cell(model: str, recipe: str) -> str:
        losses = list(of[model].get(recipe, {}).values())
        if any(map(math.isnan, losses)):
            return f"diverged ({sum(map(math.isnan, losses))} of {len(losses)})"
        values, sign = np.array(losses), ""
        if recipe != "bf16":
            values, sign = found.to_bf16(of[model], recipe), "+"
        if not len(values):
            return ""
        return f"{values.mean():{sign}.5f} ± {np.ptp(values) / 2:.5f}"

    rows = [[recipe, *(cell(model, recipe) for model in models)] for recipe in recipes]
    largest = [f"{model} ({planted[model]['largest']:g})" for model in models]
    return _table(("recipe", *largest), rows)


def planted(results: Path) -> str:
    """What planting does to the bf16 model: its activations, and not its loss."""
    models = found.one(results, "planted")
    rows = [
        [
            name,
            f"{of['largest']:g}",
            f"{of['val_loss']['python']:.6f}",
            f"{of['val_loss']['cpp']:.6f}",
        ]
        for name, of in models.items()
    ]
    head = "model", "largest activation", "loss on Python", "on C++"
    return _table(head, rows) if rows else ""


def longer(results: Path) -> str:
    """Where each run diverged, and its last validation loss."""
    rows = []
    for name, run in found.runs(results, "longer").items():
        # A gradient that is not finite ends a run whose losses all are.
        step = run["steps"] if "diverged" in run else diverged_at(run["loss"])
        rows.append(
            [
                name,
                str(run["steps"]) + ("" if run["done"] else " (stopped)"),
                "no" if step is None else f"at step {step}",
                f"{found.last_val_loss(run):.4f}",
            ]
        )
    head = "recipe", "steps", "diverged", "last validation loss"
    return _table(head, rows) if rows else ""


def killed(results: Path) -> str:
    """Whether the killed run ended as the other."""
    run = found.one(results, "killed")
    if not run:
        return ""
    differ = run["arrays_that_differ"]
    return (
        f"Killed after step {run['killed_at']} of {run['options']['steps']}: "
        f"{run['arrays'] - len(differ)} of the {run['arrays']} arrays of the last "
        f"checkpoint are bit-equal, the losses of all steps are "
        f"{'equal' if run['losses_equal'] else 'not equal'}."
    )


def diverged_at(loss: list[float | None]) -> int | None:
    """The first step at which a training loss, averaged, is far above its lowest."""
    values = np.array(loss, np.float64)
    if np.any(bad := ~np.isfinite(values)):
        return 1 + int(np.argmax(bad))
    width = min(_AVERAGED, len(values))
    means = np.convolve(values, np.full(width, 1 / width), "valid")
    risen = means > np.minimum.accumulate(means) + _RISE
    return width + int(np.argmax(risen)) if risen.any() else None


def start(results: Path) -> str:
    """Training forwards until the rate is in its range for the first time."""
    of = found.study(results, "start").get("trained", {})

    def forwards(rates: list[float]) -> str:
        inside = [_LOW <= rate <= _HIGH for rate in rates]
        return str(inside.index(True) + 1) if True in inside else f"over {len(rates)}"

    rows = [[name, forwards(values["rate"])] for name, values in of.items()]
    head = "start / first batch's threshold", "forwards until the rate is in the range"
    return _table(head, rows) if rows else ""


def thresholds(results: Path) -> str:
    """How often each projection's rate is in its range, after the first tenth."""
    run = found.one(results, "parity/fallback-0")
    rows = []
    for name, of in run.get("fallback", {}).items():
        rates = np.array(of["rate"], float)
        rates = rates[len(rates) // 10 :]
        theta = np.array(of["theta"], float)
        factors = theta[-1] / theta[0]
        rows.append(
            [
                found.projection(name),
                f"{rates.mean():.1%}",
                f"{((rates >= _LOW) & (rates <= _HIGH)).mean():.1%}",
                f"{factors.min():.2g} to {factors.max():.2g}",
            ]
        )
    if not rows:
        return ""
    looks, inside = run["looks"], f"in {_LOW:.0%} to {_HIGH:.0%}"
    moved = f"threshold at step {looks[-1]} / at step {looks[0]}"
    return _table(("projection", "mean rate", inside, moved), rows)


def _by_model(name: str, columns: Iterable[Any], *path: str) -> Callable[[Path], str]:
    """A table of a study that found a list of errors for each model and kind."""

    def table(results: Path) -> str:
        rows = []
        for model, of in found.study(results, name).items():
            for key in path:
                of = of[key]
            kinds = of if isinstance(of, dict) else {"": of}
            for kind, values in kinds.items():
                rows.append([model, kind, *(f"{value:.1e}" for value in values)])
        head = "model", "", *map(str, columns)
        return _table(head, rows) if rows else ""

    return table


def perplexity(results: Path) -> str:
    """Perplexity by the side of a block, beside that of the model in float32."""
    rows = [
        [model, kind, *(f"{value:.6g}" for value in (of["float"], *of[kind]))]
        for model, of in found.study(results, "perplexity").items()
        for kind in ("block", "fallback")
    ]
    head = "model", "", "float32", *map(str, BLOCK_SIDES)
    return _table(head, rows) if rows else ""


def blocks(results: Path) -> str:
    """How many blocks fall back, and how many of them in few channels."""
    rows = []
    for model, of in found.study(results, "blocks").items():
        for name, layers in of.items():
            cells = np.array([[list(map(int, line)) for line in m] for m in layers])
            # A layer's busiest are its own, so each is sorted before they are averaged.
            columns = np.sort(cells.mean(axis=1))[:, ::-1].mean(axis=0)
            width = max(1, len(columns) // 10)
            held = ""
            if columns.any():
                share = columns[:width].sum() / columns.sum()
                held = f"{share:.1%} in {width} of {len(columns)}"
            rows.append([model, name, f"{cells.mean():.1%}", held])
    busiest = "of these in the busiest tenth of the blocks of channels"
    head = "model", "input of", "fall back", busiest
    return _table(head, rows) if rows else ""


def _table(head: Iterable[str], rows: list[list[str]]) -> str:
    head = list(head)
    rows = [row + [""] * (len(head) - len(row)) for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# By name, as the page has them.
TABLES: dict[str, Callable[[Path], str]] = {
    "parity": parity,
    "cost": cost,
    "planted": planted,
    "outliers": outliers,
    "error": _by_model("error", error.PLAIN, "down"),
    "criteria": _by_model("criteria", criteria.RATES, "down"),
    "operands": _by_model("operands", gradients.BITS),
    "passes": _by_model("passes", gradients.RATES),
    "nonlinear": _by_model("nonlinear", gradients.SAVED_BITS),
    "perplexity": perplexity,
    "blocks": blocks,
    "thresholds": thresholds,
    "start": start,
    "longer": longer,
    "killed": killed,
}
