"""The tables of the experiments about training runs."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

from examples.llama.experiments import result_files
from examples.llama.experiments.markdown import table
from examples.llama.experiments.result_files import Json
from fbq_jax import recipes

# A run counts as diverged where the mean loss of this many steps exceeds its minimum by
# this much.
_WINDOW, _RISE = 50, 0.5
_LOW, _HIGH = recipes.fallback.target_rate


def corpus(results: Path) -> str:
    """The files that the runs read, with their sizes and parts of their digests."""
    rows = []
    for domain, parts in result_files.one(results, "corpus").items():
        for part in ("train", "val"):
            fact = parts[part]
            sizes = [f"{fact[name]:,}" for name in ("files", "bytes", "tokens")]
            rows.append([f"`{domain}/{part}.bin`", *sizes, _start_of_digest(fact)])
        digest = _start_of_digest(parts["tokenizer"])
        rows.append([f"`{domain}/tokenizer.json`", "", "", "", digest])
    return table(("file", "of files", "bytes", "tokens", "SHA-256 begins"), rows)


def _start_of_digest(fact: Json) -> str:
    return f"`{fact['sha256'][:12]}`"


def parity(results: Path) -> str:
    """Final validation losses, their differences from bf16, speed and memory."""
    runs = result_files.runs(results, "parity")
    if not runs:
        return ""
    # Only losses after all steps are comparable.
    ended = {n: result_files.last_val_loss(run) for n, run in _ended(runs).items()}
    base = ended.get("bf16-0", math.nan)
    rows = []
    for name, run in runs.items():
        loss, peak = result_files.last_val_loss(run), run["peak_bytes"]
        # Training losses are comparable on the same batches, so with the same seed.
        same = "bf16-" + name.partition("-")[2]
        paired = name in ended and same in ended
        how = "diverged" if "diverged" in run else "stopped"
        difference = ended.get(name, math.nan) - base
        compared = not math.isnan(difference)
        rows.append(
            [
                name + ("" if name in ended else f" ({how} at step {run['steps']})"),
                f"{loss:.4f}",
                f"{difference:+.4f}" if compared else "",
                f"{difference / base:+.2%}" if compared else "",
                f"{_late(run) / _late(runs[same]) - 1:+.2%}" if paired else "",
                f"{run['tokens_per_s']:,.0f}",
                "" if peak is None else f"{peak / 1e9:.1f}",
            ]
        )
    head = (
        "recipe and seed",
        *("validation loss", "vs bf16-0", "", "training loss vs bf16 of this seed"),
        *("tokens/s", "peak GB"),
    )
    return f"{_about(runs)}\n\n{table(head, rows)}"


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


def _ended(runs: dict[str, Json]) -> dict[str, Json]:
    """The runs that took all of their steps."""
    return {n: run for n, run in runs.items() if run["done"] and "diverged" not in run}


def _late(run: Json) -> float:
    """The mean training loss of the last tenth of the steps."""
    return statistics.fmean(run["loss"][-max(1, run["steps"] // 10) :])


def paired(results: Path) -> str:
    """Each recipe's losses minus bf16's of the same seed: means with intervals."""
    runs = _ended(result_files.runs(results, "parity"))
    val, late = by_seed(runs, result_files.last_val_loss), by_seed(runs, _late)
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


def pairs(results: Path) -> str:
    """Which recipes' training losses differ, in each pair of recipes; in percent."""
    late = by_seed(_ended(result_files.runs(results, "parity")), _late)
    names = [name for name, of_seeds in late.items() if len(of_seeds) > 1]
    rows = []
    for first in names:
        row = [first]
        for second in names:
            x = np.array([]) if first == second else relative(late, first, second)
            real = len(x) > 1 and np.abs(x.mean()) > _half_interval(x)
            text = f"{100 * x.mean():+.2f}" if len(x) > 1 else ""
            row.append(f"**{text}**" if real else text)
        rows.append(row)
    return table(("minus", *names), rows) if len(names) > 1 else ""


def by_seed(
    runs: dict[str, Json], loss: Callable[[Json], float]
) -> dict[str, dict[str, float]]:
    """A loss of each run, by recipe and seed."""
    found: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        recipe, _, seed = name.partition("-")
        found.setdefault(recipe, {})[seed] = loss(run)
    return found


def relative(
    losses: dict[str, dict[str, float]], recipe: str, other: str
) -> np.ndarray:
    """The relative differences of two recipes' losses, for each seed of both."""
    own, base = losses[recipe], losses[other]
    return np.array([own[seed] / base[seed] - 1 for seed in own if seed in base])


def mean_and_interval(x: np.ndarray) -> tuple[str, str]:
    """The mean of relative differences, and its 95 % confidence interval."""
    return f"{x.mean():+.3%}", f"± {_half_interval(x):.3%}"


def _half_interval(x: np.ndarray) -> float:
    """Half of the mean's 95 % confidence interval, by Student's t distribution."""
    error = x.std(ddof=1) / math.sqrt(len(x))
    return float(stats.t.ppf(0.975, len(x) - 1) * error)


def cost(results: Path) -> str:
    """Time and memory of completed runs, and when each reached a common loss.

    Runs on other devices are not compared in speed.
    """
    runs = _ended(result_files.runs(results, "parity"))
    if "bf16-0" not in runs:
        return ""
    base, labels = runs["bf16-0"], result_files.labels(runs)
    reached = max(map(result_files.last_val_loss, runs.values()))
    rows = []
    for name, run in runs.items():
        seconds, losses = result_files.losses_by_time(run)
        # `interp` needs increasing values: the negative of the lowest loss so far.
        when = float(np.interp(-reached, -np.minimum.accumulate(losses), seconds))
        peaks = run["peak_bytes"], base["peak_bytes"]
        same = run["machine"]["device"] == base["machine"]["device"]
        rows.append(
            [
                labels[name],
                f"{seconds[-1]:.0f}",
                f"{run['tokens_per_s'] / base['tokens_per_s']:.2f}" if same else "",
                f"{when:.0f}",
                "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}",
            ]
        )
    speed, memory = "speedup vs bf16-0", "peak memory vs bf16-0"
    return table(
        ("recipe and seed", "seconds", speed, f"seconds to {reached:.4f}", memory), rows
    )


def outliers(results: Path) -> str:
    """Losses of bf16 and differences from them: means and half ranges over seeds.

    A recipe with one seed has no range.
    """
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


def planted(results: Path) -> str:
    """The largest activations and the losses of the models with outliers."""
    models = result_files.one(results, "planted")
    # Results from before outliers were planted in gradients do not have their sizes.
    has_gradients = all("gradient_ratio" in model for model in models.values())
    rows = [
        [
            name,
            f"{model['largest']:g}",
            f"{model['val_loss']['python']:.6f}",
            f"{model['val_loss']['cpp']:.6f}",
            *([f"{model['gradient_ratio']:.0f}"] if has_gradients else []),
        ]
        for name, model in models.items()
    ]
    head = ["model", "largest activation", "loss on Python", "on C++"]
    if has_gradients:
        head.append("largest gradient over root mean square")
    return table(head, rows)


def longer(results: Path) -> str:
    """Where each long run diverged, and its last validation loss."""
    rows = []
    runs = result_files.runs(results, "longer").values()
    for run in sorted(runs, key=lambda run: run["options"]["lr"]):
        # A run can end at a gradient that is not finite although all losses are.
        step = run["steps"] if "diverged" in run else diverged_at(run["loss"])
        rows.append(
            [
                run["options"]["recipe"],
                f"{run['options']['lr']:g}",
                str(run["steps"]) + ("" if run["done"] else " (stopped)"),
                "no" if step is None else f"at step {step}",
                f"{result_files.last_val_loss(run):.4f}",
            ]
        )
    head = "recipe", "learning rate", "steps", "diverged", "last validation loss"
    return table(head, rows)


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


def thresholds(results: Path) -> str:
    """How often each projection's rate is in its range after the first tenth."""
    run = result_files.one(results, "parity/fallback-0")
    if not run.get("fallback"):
        return ""
    rows = []
    for name, layer in run["fallback"].items():
        rates = np.array(layer["rate"], float)
        rates = rates[len(rates) // 10 :]
        theta = np.array(layer["theta"], float)
        factors = theta[-1] / theta[0]
        rows.append(
            [
                result_files.projection(name),
                f"{rates.mean():.1%}",
                f"{((rates >= _LOW) & (rates <= _HIGH)).mean():.1%}",
                f"{factors.min():.2g} to {factors.max():.2g}",
            ]
        )
    looks, inside = run["looks"], f"in {_LOW:.0%} to {_HIGH:.0%}"
    moved = f"threshold at step {looks[-1]} / at step {looks[0]}"
    return table(("projection", "mean rate", inside, moved), rows)
