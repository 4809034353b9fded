"""The tables of the experiments, each from a folder of results; empty without them."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

from experiments import result_files
from experiments.markdown import table
from experiments.result_files import Json, last_val_loss
from experiments.settings import RECIPES, TRAINED
from experiments.studies import of_models

# A run counts as diverged where the mean loss of this many steps exceeds its minimum by
# this much.
_WINDOW, _RISE = 50, 0.5
# A model whose planted outliers are no larger than its own.
_UNCHANGED = "58"


def parity(results: Path) -> str:
    """Final losses and their differences from bf16, speed and memory.

    Losses are compared after all steps only, and speeds on one device only.
    """
    runs = result_files.runs(results, "parity")
    if not runs:
        return ""
    finished = _finished(runs)
    base = finished.get("bf16-0")
    worst = max(map(last_val_loss, finished.values()), default=math.nan)
    rows = []
    for name, run in runs.items():
        cells = [""] * 4
        # Training losses are comparable on the same batches, so with the same seed.
        same = finished.get("bf16-" + name.partition("-")[2])
        if name in finished and base:
            cells[0] = f"{last_val_loss(run) / last_val_loss(base) - 1:+.2%}"
        if name in finished and same:
            cells[1] = f"{late_loss(run) / late_loss(same) - 1:+.2%}"
        if name in finished and base and _device(run) == _device(base):
            cells[2] = f"{run['tokens_per_s'] / base['tokens_per_s']:.2f}"
            cells[3] = f"{_seconds_to(worst, run):.0f}"
        how = "diverged" if "diverged" in run else "stopped"
        what = "" if name in finished else f" ({how} at step {run['steps']})"
        speed, peak = f"{run['tokens_per_s']:,.0f}", run["peak_bytes"]
        memory = "" if peak is None else f"{peak / 1e9:.1f}"
        rows.append([name + what, f"{last_val_loss(run):.4f}", *cells, speed, memory])
    head = (
        *("recipe and seed", "validation loss", "vs bf16-0"),
        *("training loss vs bf16 of this seed", "speedup vs bf16-0"),
        *(f"seconds to {worst:.4f}", "tokens/s", "peak GB"),
    )
    return f"{_about(runs)}\n\n{table(head, rows)}"


def _device(run: Json) -> str:
    return run["machine"]["device"]


def _finished(runs: dict[str, Json]) -> dict[str, Json]:
    """The runs that took all of their steps."""
    return {n: run for n, run in runs.items() if run["done"] and "diverged" not in run}


def late_loss(run: Json) -> float:
    """Returns the mean training loss of the last tenth of the steps."""
    return float(np.mean(run["loss"][-max(1, run["steps"] // 10) :]))


def _seconds_to(loss: float, run: Json) -> float:
    """The seconds of training, without validations, until a validation loss."""
    options = run["options"]
    seconds_per_step = options["batch"] * options["seq"] / run["tokens_per_s"]
    seconds = np.array(list(map(int, run["val_loss"]))) * seconds_per_step
    losses = np.array(list(run["val_loss"].values()), float)
    # `interp` needs increasing values: the negative of the lowest loss so far.
    return float(np.interp(-loss, -np.minimum.accumulate(losses), seconds))


def _about(runs: dict[str, Json]) -> str:
    """The size of the runs and their machines, with what differs between them."""
    first = next(iter(runs.values()))
    options, corpus = first["options"], first["options"]["corpus"]
    tokens = options["steps"] * options["batch"] * options["seq"]
    facts = []
    for fact in dict.fromkeys(fact for run in runs.values() for fact in run["machine"]):
        of_runs: dict[str, list[str]] = {}
        for name, run in runs.items():
            of_runs.setdefault(run["machine"].get(fact, "none"), []).append(name)
        values = [f"{value} ({', '.join(names)})" for value, names in of_runs.items()]
        facts.append(f"{fact} {' and '.join(values if len(values) > 1 else of_runs)}")
    return (
        f"{tokens / 1e6:.1f} million tokens per run, {tokens / corpus['train']:.2f} "
        f"epochs of {corpus['train'] / 1e6:.1f} million; {', '.join(facts)}."
    )


def paired(results: Path) -> str:
    """Each recipe's losses over bf16's of the same seed: means with intervals."""
    runs = _finished(result_files.runs(results, "parity"))
    val, late = by_seed(runs, last_val_loss), by_seed(runs, late_loss)
    if "bf16" not in val:
        return ""
    rows = []
    for recipe in val:
        differences = [relative(losses, recipe, "bf16") for losses in (val, late)]
        if recipe == "bf16" or min(map(len, differences)) < 2:
            continue
        cells = [cell for x in differences for cell in mean_and_interval(x)]
        rows.append([recipe, str(len(differences[0])), *cells])
    interval = "95 % interval"
    head = "recipe", "seeds", "validation loss vs bf16", interval
    return table((*head, "training loss vs bf16", interval), rows)


def by_seed(
    runs: dict[str, Json], value: Callable[[Json], float]
) -> dict[str, dict[str, float]]:
    """Returns a value of each run, by recipe and seed."""
    found: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        recipe, _, seed = name.partition("-")
        found.setdefault(recipe, {})[seed] = value(run)
    return found


def relative(
    losses: dict[str, dict[str, float]], recipe: str, other: str
) -> np.ndarray:
    """Returns the relative differences of two recipes' losses, for seeds of both."""
    own, base = losses[recipe], losses[other]
    return np.array([own[seed] / base[seed] - 1 for seed in own if seed in base])


def mean_and_interval(x: np.ndarray) -> tuple[str, str]:
    """Returns the mean of relative differences, and its 95 % confidence interval."""
    return f"{x.mean():+.3%}", f"± {_half_interval(x):.3%}"


def _half_interval(x: np.ndarray) -> float:
    """Half of the mean's 95 % confidence interval, by Student's t distribution."""
    error = x.std(ddof=1) / math.sqrt(len(x))
    return float(stats.t.ppf(0.975, len(x) - 1) * error)


def outliers(results: Path) -> str:
    """Losses of bf16 and differences from them: means and half ranges over seeds."""
    losses = result_files.losses_by_model(result_files.runs(results, "outliers"))
    planted = result_files.one(results, "planted")
    if not losses or not planted:
        return ""
    models = [model for model in planted if model in losses]
    names = dict.fromkeys(recipe for model in models for recipe in losses[model])
    rows = [[name, *(_loss_cell(losses[m], name) for m in models)] for name in names]
    largest = [f"{model} ({planted[model]['largest']:g})" for model in models]
    return table(("recipe", *largest), rows)


def _loss_cell(losses: dict[str, dict[int, float]], recipe: str) -> str:
    """A recipe's losses minus bf16's, on one model; for bf16 the losses themselves."""
    values = list(losses.get(recipe, {}).values())
    if diverged := sum(map(math.isnan, values)):
        return f"diverged ({diverged} of {len(values)})"
    numbers, sign = np.array(values), ""
    if recipe != "bf16":
        numbers, sign = result_files.differences_from_bf16(losses, recipe), "+"
    if not len(numbers):
        return ""
    half_range = f" ± {np.ptp(numbers) / 2:.5f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():{sign}.5f}{half_range}"


def longer(results: Path) -> str:
    """Where the long runs diverged, and their last validation losses, by rate."""
    runs = result_files.runs(results, "longer").values()
    lrs = sorted({run["options"]["lr"] for run in runs})
    rows: dict[str, list[str]] = {}
    for run in runs:
        recipe, lr = run["options"]["recipe"], run["options"]["lr"]
        row = rows.setdefault(recipe, [recipe, *[""] * 2 * len(lrs)])
        # A run can end at a gradient that is not finite although all losses are.
        step = run["steps"] if "diverged" in run else diverged_at(run["loss"])
        text = "no" if step is None else f"at step {step}"
        if not run["done"]:
            text += f" (stopped at {run['steps']})"
        place = 1 + 2 * lrs.index(lr)
        row[place : place + 2] = text, f"{last_val_loss(run):.4f}"
    head = [x for lr in lrs for x in (f"{lr:g}: diverged", "last validation loss")]
    return table(("recipe", *head), list(rows.values()))


def diverged_at(loss: list[float | None]) -> int | None:
    """Returns the first step whose smoothed loss is far above the minimum so far."""
    values = np.array(loss, np.float64)
    if np.any(bad := ~np.isfinite(values)):
        return 1 + int(np.argmax(bad))
    width = min(_WINDOW, len(values))
    means = np.convolve(values, np.full(width, 1 / width), "valid")
    risen = means > np.minimum.accumulate(means) + _RISE
    return width + int(np.argmax(risen)) if risen.any() else None


def killed(results: Path) -> str:
    """Whether the killed run ended like the complete one."""
    run = result_files.one(results, "killed")
    if not run:
        return ""
    differ = run["arrays_that_differ"]
    return (
        f"Killed after step {run['killed_at']} of {run['options']['steps']}: "
        f"{run['arrays'] - len(differ)} of the {run['arrays']} arrays of the last "
        f"checkpoint are bit-equal, the losses of all steps are "
        f"{'equal' if run['losses_equal'] else 'not equal'}."
    )


def models_to_show(results: Path, name: str) -> Json:
    """Returns what a study found, by model; without `_UNCHANGED`."""
    found = result_files.study(results, name)
    return {model: of for model, of in found.items() if model != _UNCHANGED}


def by_recipe(results: Path) -> str:
    """The perplexity and the error of the gradient, by recipe."""
    found = models_to_show(results, "recipes")
    rows = [
        [name, *(f"{of[name]['perplexity']:.5g}" for of in found.values())]
        + [f"{of[name]['gradient']:.1e}" for of in found.values()]
        for name in next(iter(found.values()), {})
        if name in (of_models.FLOAT, *RECIPES)
    ]
    head = (
        f"{what}, {model}" for what in ("perplexity", "gradient") for model in found
    )
    return table(("recipe", *head), rows)


def blocks(results: Path) -> str:
    """The fallback rate, and its concentration in the busiest blocks of channels.

    Inputs that planting did not change are shown once.
    """
    models = models_to_show(results, "blocks")
    trained = models.get(TRAINED)
    rows = [
        [model, name, *_concentration(layers)]
        for model, found in models.items()
        for name, layers in found.items()
        if found is trained or trained is None or layers != trained[name]
    ]
    busiest = "of these in the busiest tenth of the blocks of channels"
    return table(("model", "input of", "fall back", busiest), rows)


def _concentration(layers: list[list[str]]) -> list[str]:
    """The cells of a row, from maps of the blocks of each layer."""
    cells = np.array([[list(map(int, line)) for line in layer] for layer in layers])
    # Each layer is sorted before the average, because its busiest columns differ.
    columns = np.sort(cells.mean(axis=1))[:, ::-1].mean(axis=0)
    width = max(1, len(columns) // 10)
    rate = f"{cells.mean():.1%}"
    if not columns.any():
        return [rate]
    share = columns[:width].sum() / columns.sum()
    return [rate, f"{share:.1%} in {width} of {len(columns)}"]
