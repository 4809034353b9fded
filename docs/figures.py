"""Fills tables of the documents, and draws their pictures, from committed JSON.

    python -m docs.figures

A table's place on a page is `<!-- name -->` to `<!-- end -->`.
"""

import argparse
import functools
import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from examples.grpo import plot as grpo_plot
from examples.llama import atomic, plot
from experiments import errors, result_files
from experiments import page as evidence
from experiments import tables as run_tables
from experiments.markdown import fill, table
from fbq_jax import recipes
from fbq_jax.bench import picture, report
from fbq_jax.bench import results as bench_results
from fbq_jax.bench.results import Row

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "fbq_jax/bench/results"
LLAMA = ROOT / "examples/llama/results"
GRPO = ROOT / "examples/grpo/results/cpu.json"
EXPERIMENTS = evidence.RESULTS
# Recipes and variants that the library had while they were measured.
REMOVED = {
    "fallback_hadamard",
    "row_block_equalized",
    "fallback, dW too",
    "fallback, dW too, half of blocks",
    "row_block, Hadamard",
}


def load(file: Path) -> dict[str, Any]:
    """The sections of a file, without rows of what is removed."""
    return {
        name: section | {"rows": [r for r in section["rows"] if r.what not in REMOVED]}
        for name, section in bench_results.load(file).items()
    }


SECTIONS = load(BENCH / "nvidia-h200.json")
H100 = load(BENCH / "nvidia-h100-80gb-hbm3.json")
ERRORS = json.loads(errors.RESULTS.read_text())
MODELS = json.loads((ROOT / "tests/fbq_jax/contrib/public_models.json").read_text())
BLOCK = (4096, 14336, 16384)
# The section and shape of each row of the tables of speedups, by its title.
SPEEDS = {
    "training step of `nn.Dense`, 4096 to 4096 channels": ("step", (8192, 4096, 4096)),
    "training step of `nn.Dense`, 2048 to 2048": ("step", (8192, 2048, 2048)),
    "training step of `nn.Dense`, 4096 to 14336": ("step", (8192, 4096, 14336)),
    "Llama block of 8192 channels": ("block", (8192, 28672, 16384)),
    "Llama block of 4096 channels": ("block", BLOCK),
    "Llama block of 2048 channels": ("block", (2048, 5632, 16384)),
    "optimizer step of a Llama, 4 layers of 4096": ("train", (4096, 14336, 4, 8)),
    "optimizer step of a Llama, 22 layers of 2048": ("train", (2048, 5632, 22, 4)),
    "four microbatches, 22 layers of 2048": ("accumulation", (2048, 5632, 22, 4, 4)),
}
PROGRAMS = ("fallback", "row_block_lhs", "fp8_row_block_lhs", "block")
# The recipes that `choose_recipes` compares: where to take them, and what a training
# step carries for each layer.
CANDIDATES = {
    "block": ("from Ampere on; experts, too", "none"),
    "row_block_lhs": ("Hopper", "none"),
    "fallback": ("from Ampere on; experts, too", "a threshold for each layer"),
}
# Rows of layers that are not in a loop have these titles, and end with this.
UNROLLED = ", unrolled"
# The titles of rows of both kinds.
BOTH_KINDS = {
    name + kind: title + kind
    for name, title in (("bf16", "bf16"), ("fallback", "`fallback`"))
    for kind in ("", UNROLLED)
}
# Speed and memory of the runs with several seeds, all by one version.
PRETRAINING = {
    row["what"]: row for row in result_files.one(EXPERIMENTS / "seeds", "speed")["rows"]
}


def rows(
    section: str, shape: Iterable[int], sections: Mapping[str, Any] = SECTIONS
) -> dict[str, Row]:
    """The rows of a section with this shape, by name; empty without the section."""
    of_section = sections[section]["rows"] if section in sections else []
    return {row.what: row for row in of_section if row.shape == tuple(shape)}


def speed() -> str:
    """Speedups over bf16 of layers, a block and steps, mostly on an H200."""
    shown = {
        title: (section, shape)
        for title, (section, shape) in SPEEDS.items()
        if section in ("step", "train") or shape == BLOCK
    }
    title = "optimizer step of a Llama, 22 layers of 2048"
    on_h100 = {f"{title}, on an H100": SPEEDS[title]}
    return _speeds([*_cells(shown, SECTIONS), *_cells(on_h100, H100)])


def speeds() -> str:
    """Speedups over bf16 of what users run, on an H200 and on an H100."""
    return _speeds(_cells(SPEEDS, SECTIONS, H100))


def _speeds(cells: Iterable[list[str]]) -> str:
    return table(("", *(f"`{name}`" for name in PROGRAMS), "Flax's FP8"), [*cells])


def _cells(
    steps: Mapping[str, tuple[str, tuple[int, ...]]], *files: Mapping[str, Any]
) -> Iterator[list[str]]:
    """Speedups by program; several files share a cell."""
    for title, (section, shape) in steps.items():
        measured = [rows(section, shape, sections) for sections in files]
        for kind in ("", UNROLLED):
            of_programs = [
                [ratio(found.get(what + kind)) for found in measured]
                for what in (*PROGRAMS, "Flax Fp8DotGeneral")
            ]
            if any(of_programs[0]):
                yield [title + kind, *map(_joined, of_programs)]


def _joined(ratios: list[str]) -> str:
    """The ratios of several files, of which some may be missing."""
    return ", ".join(text or "-" for text in ratios) if any(ratios) else ""


def loops() -> str:
    """Milliseconds of steps on an H100, of layers in a loop and unrolled."""
    steps = (
        ("4 layers of 4096 channels", "train", (4096, 14336, 4, 8)),
        ("22 layers of 2048", "train", (2048, 5632, 22, 4)),
        ("four microbatches of 8192 tokens", "accumulation", (2048, 5632, 22, 4, 4)),
        ("four microbatches of 2048 tokens", "accumulation", (2048, 5632, 22, 1, 4)),
    )
    cells = [
        [title, *(f"{measured[name].ms:.1f}" for name in BOTH_KINDS)]
        for title, section, shape in steps
        for measured in [rows(section, shape, H100)]
    ]
    return table(("ms", *BOTH_KINDS.values()), cells)


def efficiencies() -> str:
    """The part of one H100's speed that each of several keeps."""
    of_mesh = {(row.mesh, row.what): row for row in H100["scaling"]["rows"]}
    cells = [
        [f"{title}, {n} GPUs"]
        + [f"{of_mesh[f'{axis}={n}', name].efficiency:.1%}" for name in BOTH_KINDS]
        for axis, title in (("data", "data parallelism"), ("fsdp", "FSDP"))
        for n in (2, 4)
    ]
    return table(("", *BOTH_KINDS.values()), cells)


def ratio(row: Row | None) -> str:
    """The speedup of a row; empty without one."""
    return "" if row is None else f"{row.ratio:.2f}"


def losses() -> str:
    """The losses of the recipes that ran with several seeds, and what they cost."""
    runs = result_files.runs(EXPERIMENTS / "seeds", "parity")
    of_seeds = run_tables.by_seed(runs, result_files.last_val_loss)

    def cells(what: str) -> Iterator[str]:
        row, values = PRETRAINING[what], of_seeds.get(what)
        compared = "", ""
        if values is not None and what != "bf16":
            difference = run_tables.relative(of_seeds, what, "bf16")
            compared = run_tables.mean_and_interval(difference)
        yield what if what.startswith("bf16") else f"`{what}`"
        yield "" if values is None else f"{statistics.fmean(values.values()):.4f}"
        yield from compared
        yield f"{row['tokens_per_s']:,.0f}"
        yield f"{row['peak_bytes'] / 1e9:.1f}"

    head = "recipe", "validation loss", "vs bf16", "95 % interval", "tokens/s"
    return table((*head, "peak GB"), [list(cells(what)) for what in PRETRAINING])


def candidates() -> str:
    """What the recipes that `choose_recipes` compares give and need, on an H200."""
    names, slowest, found = [*CANDIDATES], _slowest_layers(), _errors()
    layers, trained = [slowest[name] for name in names], map(_training, names)
    devices, state = zip(*CANDIDATES.values(), strict=True)
    speeds, losses = zip(*trained, strict=True)

    def of_outliers(error: str) -> list[str]:
        xs = "Gaussian", "up to 606"
        values = [[f"{found[name][x][error]:.3f}" for x in xs] for name in names]
        return list(map(", ".join, values))

    rows = {
        "NVIDIA GPUs": devices,
        "layer: speedup": map(ratio, layers),
        "training: speedup": speeds,
        "training: loss vs bf16": losses,
        "error of Y: X without outliers, up to 606": of_outliers("y_token"),
        "error of dW: the same": of_outliers("dw_in"),
        "saved of X, kB/token": [f"{(x.saved_bytes or 0) / 1e3:.1f}" for x in layers],
        "state that a training step carries": state,
    }
    head = ("", *(f"`{name}`" for name in names))
    return table(head, [[title, *cells] for title, cells in rows.items()])


def measured() -> str:
    """What is measured of every recipe on an H200, in one row each."""
    tuned = result_files.losses_by_model(
        result_files.runs(EXPERIMENTS / "full", "outliers")
    )
    layers = _slowest_layers()

    def cells(name: str) -> Iterator[str]:
        yield f"`{name}`"
        slowest = layers.get(name)
        yield ratio(slowest)
        yield "" if slowest is None else f"{(slowest.saved_bytes or 0) / 1e3:.1f}"
        yield from _training(name)
        for model in ("58", "606", "6559"):
            found = result_files.differences_from_bf16(tuned[model], name)
            yield f"{found.mean():+.4f}" if len(found) else ""

    head = (
        *("recipe", "layer: speedup", "saved of X, kB/token"),
        *("training: speedup", "loss vs bf16"),
        *("fine-tuning, 58", "606", "6559"),
    )
    named = [name for name in recipes.NAMED if name not in REMOVED]
    names = (*named, "fp8_delayed", "fp8_current")
    chance = ["bf16, another seed", "", "", *_training("chance")]
    return table(head, [chance, *(list(cells(name)) for name in names)])


@functools.cache
def _trained() -> tuple[dict[str, Any], ...]:
    """The runs of pretraining; where a recipe has several seeds, their mean counts."""
    single = result_files.runs(EXPERIMENTS / "full", "parity")
    single["chance-0"] = single["bf16-1"]  # compared with bf16-0
    return result_files.runs(EXPERIMENTS / "seeds", "parity"), single


def _training(name: str) -> tuple[str, str]:
    """The speedup and the loss over bf16 of the same seeds, means of all seeds."""
    found = next((runs for runs in _trained() if f"{name}-0" in runs), None)
    if found is None:
        return "", ""
    loss, speed = (
        run_tables.relative(run_tables.by_seed(found, value), name, "bf16").mean()
        for value in (result_files.last_val_loss, lambda run: run["tokens_per_s"])
    )
    if name in PRETRAINING:
        of_row = PRETRAINING[name]["tokens_per_s"]
        speed = of_row / PRETRAINING["bf16"]["tokens_per_s"] - 1
    return f"{1 + speed:.2f}", f"{loss:+.2%}"


def recipe_errors() -> str:
    """Errors of all recipes and variants, on all operands."""
    xs = ["Gaussian", *errors.OUTLIERS, "606, all tokens"]
    columns = {
        **{f"Y, {x}": (x, "y_token") for x in xs},
        "Y, W up to 606": ("W up to 606", "y_channel"),
        "dX, dY up to 606": ("dY up to 606", "dx_token"),
        **{f"dW, {x}": (x, "dw_in") for x in xs},
        "dW, dY up to 606": ("dY up to 606", "dw_out"),
        "Y, uneven W": ("uneven W", "y_channel"),
        "Y, only W uneven": ("only W uneven", "y_channel"),
    }
    versions = ", ".join(f"{name} {v}" for name, v in ERRORS["versions"].items())
    return (
        "**Errors of recipes with outliers in X, W or dY** (M, K, N = "
        f"{', '.join(map(str, ERRORS['shape']))}), by the reference on a "
        f"{ERRORS['device'].upper()}, {ERRORS['date']}, {versions}.\n\n"
        f"{_errors_table({name: name for name in _errors()}, columns)}"
    )


def _errors() -> dict[str, dict[str, dict[str, float]]]:
    """The errors by the name of a recipe or a variant and of the operands."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in ERRORS["recipe_errors"]:
        if row["what"] not in REMOVED:
            found.setdefault(row["what"], {})[row["data"]] = row["errors"]
    return found


def _errors_table(
    names: Mapping[str, str], columns: Mapping[str, tuple[str, str]]
) -> str:
    """A table of errors; names and columns are by their titles."""
    cells = [
        [title, *(f"{_errors()[name][x][e]:.3f}" for x, e in columns.values())]
        for title, name in names.items()
    ]
    return table(("recipe", *columns), cells)


def memory() -> str:
    """Time and memory of a Llama block of 4096 channels."""
    cells = [
        [
            name,
            f"{row.ms:.1f}",
            ratio(row),
            f"{(row.saved_bytes or 0) / 1e3:.1f}",
            f"{(row.peak_bytes or 0) / 1e9:.1f}",
        ]
        for name, row in rows("block", BLOCK).items()
    ]
    head = ("block", "ms", "speedup vs bf16", "saved, kB/token", "peak, GB")
    return table(head, cells)


def batches() -> str:
    """Speedups of layers by the number of tokens in a step."""
    tokens = sorted({row.shape[0] for row in SECTIONS["map"]["rows"]})
    cells = [
        [
            name,
            f"{K} to {N}",
            *(ratio(rows("map", (M, K, N)).get(name)) for M in tokens),
        ]
        for name in ("fallback", "block")
        for K, N in ((1024, 4096), (2048, 2048), (4096, 4096), (8192, 8192))
    ]
    return table(("recipe", "channels", *(f"{M} tokens" for M in tokens)), cells)


def libraries() -> str:
    """Speedups of linear layers over bf16, by this and by other libraries."""
    shapes = ((8192, 4096, 4096), (8192, 4096, 14336))
    names = ("fallback", "block", "Flax Fp8DotGeneral", "Qwix INT8", "AQT INT8")
    cores = {
        (row.what, row.shape): row
        for row in SECTIONS["linear"]["rows"]
        if row.layer in ("core", None) and row.implementation != "triton"
    }
    cells = [
        [name, *(ratio(cores.get((name, shape))) for shape in shapes)] for name in names
    ]
    return table(("", *(f"{K} to {N} channels" for _, K, N in shapes)), cells)


def maxtext() -> str:
    """The steps of MaxText, quantized and not."""
    programs = json.loads((ROOT / "examples/maxtext/nvidia-h200.json").read_text())
    names = {"bf16": "bfloat16", "fp8": "MaxText's `quantization=fp8`"}
    base = programs["bf16"]["ms"]
    cells = [
        [
            names.get(name, f"`{name}`"),
            f"{program['ms']:.0f}",
            f"{base / program['ms']:.2f}",
            f"{program['peak_bytes'] / 2**30:.1f}",
            f"{program['losses'][-1]:.3f}",
        ]
        for name, program in programs.items()
    ]
    head = ("", "ms per step", "speedup", "peak memory, GiB", "loss of the last step")
    return table(head, cells)


def _slowest_layers() -> dict[str, Row]:
    """The row of each recipe with the X for which it is slowest."""
    found: dict[str, Row] = {}
    for row in SECTIONS["recipes"]["rows"]:
        other = found.setdefault(row.what, row)
        found[row.what] = min(row, other, key=lambda row: row.ratio)
    return found


def models() -> str:
    """Public models quantized by this library and by Qwix, and the losses of both."""
    cells = [
        [
            name,
            f"{row['package']} {row['versions'][row['package']]}",
            row["api"],
            f"`{row['function']}`",
            str(row["products"]),
            str(len(row["in_float"])),
            _losses(row["losses_in_float"]),
            _losses(row["losses"]),
            *_by_qwix(row["qwix"]),
        ]
        for name, row in MODELS.items()
    ]
    head = ("model", "package", "API", "call", "parameters in INT8", "in float")
    losses = ("losses in float", "losses", "Qwix: losses", "Qwix: products in INT8")
    return table((*head, *losses), cells)


def _losses(losses: Iterable[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)


def _by_qwix(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [f"`{textwrap.shorten(row['error'], 100, placeholder=' ...')}`", ""]
    count = row["products"]
    return [_losses(row["losses"]), f"{count} of {count + row['products_in_float']}"]


def moe() -> str:
    """Milliseconds of mixtures of experts, and speedups, by their sizes."""
    sizes = {
        "8 experts, 14336, 4096": (8192, 4096, 14336, 8, 2),
        "128 experts, 768, 2048": (4096, 2048, 768, 128, 8),
        "256 experts, 2048, 7168": (8192, 7168, 2048, 256, 8),
    }
    of_sizes = [rows("moe", shape) for shape in sizes.values()]
    cells = [
        [name, *(f"{of[name].ms:.2f} ({of[name].ratio:.2f}x)" for of in of_sizes)]
        for name in of_sizes[0]
    ]
    return table(("ms of", *sizes), cells)


def invariant() -> str:
    """What an invariant Llama costs, on an H200."""
    found = {(row.data, row.what): row for row in SECTIONS["invariant"]["rows"]}
    cells = []
    for recipe in ("rowwise", "row_block_lhs"):
        for data, title in ("training", "step"), ("decoding", "token"):
            row, changed = (
                found[data, name] for name in (recipe, f"{recipe}, invariant")
            )
            times = f"{row.ms:.2f}", f"{changed.ms:.2f}"
            cost = f"{changed.ms / row.ms - 1:+.1%}"
            ratio = f"{changed.ratio:.2f}"
            cells.append([f"`{recipe}`", title, *times, cost, ratio])
    head = "recipe", "ms of a", "ordinary", "invariant", "cost", "speedup over bf16"
    return table(head, cells)


def grpo() -> str:
    """Rewards and mismatches of reinforcement learning on a CPU."""
    last = 10
    cells = []
    for label, runs in grpo_plot.by_label(json.loads(GRPO.read_text())).items():
        rewards = [statistics.fmean(run["reward"][-last:]) for run in runs]
        largest, mean, clipped = (
            [value for run in runs for value in run[name]]
            for name in ("max_log_ratio", "mean_log_ratio", "clipped")
        )
        cells.append(
            [
                label,
                f"{statistics.fmean(run['reward'][0] for run in runs):.2f}",
                f"{statistics.fmean(rewards):.2f}",
                ", ".join(f"{reward:.2f}" for reward in rewards),
                f"{statistics.fmean(size > 0 for size in largest):.0%}",
                f"{max(largest):.2g}",
                f"{statistics.fmean(mean):.2g}",
                f"{statistics.fmean(clipped):.1%}",
            ]
        )
    return table(
        (
            *("recipe", "right answers: step 1", f"last {last} steps", "of each seed"),
            *("rollouts with a mismatch", "largest abs(log ratio)", "mean", "clipped"),
        ),
        cells,
    )


# The pages with places for tables.
PAGES = (
    "README.md",
    "docs/choose-a-recipe.md",
    "docs/guides/experts.md",
    "docs/guides/grpo.md",
    "docs/guides/rollouts.md",
    "docs/guides/serving.md",
    "docs/guides/small-layers.md",
    "docs/guides/whole-models.md",
    "docs/integrations/maxtext.md",
    "docs/performance/errors.md",
    "docs/performance/results.md",
)


# ``python -m fbq_jax.bench table`` prints the others, too.
SECTIONS_SHOWN = ("serve",)
SUMMARIES = (
    *(speed, speeds, losses, candidates, measured, memory, batches, loops),
    *(efficiencies, libraries, maxtext),
    *(recipe_errors, models, moe, invariant, grpo),
)


def tables() -> dict[str, str]:
    """All tables of these pages, by the names of their places."""
    return {
        **{name: report.markdown({name: SECTIONS[name]}) for name in SECTIONS_SHOWN},
        **{summary.__name__: summary() for summary in SUMMARIES},
    }


def filled(page: str) -> str:
    """A page with its tables."""
    return fill((ROOT / page).read_text(), tables().__getitem__)


def draw_block() -> Figure:
    """The time and the memory of a Llama block, as bars."""
    measured = list(rows("block", BLOCK).values())
    names = [row.what for row in measured]
    figure = Figure(figsize=(10, 0.4 * len(measured) + 1.2), layout="constrained")
    time, saved = figure.subplots(1, 2)
    hidden, mlp, tokens = BLOCK
    time.set(title=f"hidden {hidden}, MLP {mlp}, {tokens} tokens", xlabel="ms")
    saved.set(xlabel="saved for the backward pass, kB/token")
    for axis, values in (
        (time, [row.ms for row in measured]),
        (saved, [(row.saved_bytes or 0.0) / 1e3 for row in measured]),
    ):
        colors = ["gray" if name.startswith("bf16") else "tab:blue" for name in names]
        axis.bar_label(axis.barh(names, values, color=colors), fmt="%.1f", padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    saved.set_yticklabels([])
    return figure


def draw_errors() -> Figure:
    """Errors of Y, dX and dW as outliers of X grow, by the reference."""
    panels = {
        "y_token": "Y, mean over\ntokens",
        "dx_token": "dX",
        "dw_in": "dW, mean over\ninput channels",
    }
    xs = ["Gaussian", *errors.OUTLIERS, "606, all tokens"]
    found = _errors()
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (error, title) in zip(axes, panels.items(), strict=True):
        for i, (name, by_x) in enumerate(found.items()):
            axis.plot(
                xs,
                [by_x[x][error] for x in xs],
                color=colormaps["tab10"](i % 10),
                linestyle=("-", "--", ":")[i // 10 % 3],
                marker=".",
                label=name,
                zorder=len(found) - i,  # the first line on top
            )
        axis.set(title=title, yscale="log")
        axis.tick_params(axis="x", rotation=30)
        for tick in axis.get_xticklabels():
            tick.set_horizontalalignment("right")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="relative error")
    shape = " x ".join(map(str, ERRORS["shape"]))
    figure.suptitle(f"Errors of a linear layer, M x K x N = {shape}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, labels=labels, loc="outside right upper")
    return figure


def draw_runs_on_a_cpu() -> Figure:
    """Final losses of every recipe minus bf16's, beside the effect of chance."""
    runs = json.loads((LLAMA / "compare-cpu.json").read_text())["runs"]
    bf16 = runs["bf16"]
    chance = json.loads((LLAMA / "chance-cpu.json").read_text())["runs"]
    of_chance = {f"bf16, saved bits {n.split('-')[1]}": r for n, r in chance.items()}
    compared = {name: run for name, run in runs.items() if name != "bf16"} | of_chance
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=1)
    for marker, key, label in (
        ("o", "val_loss", "validation"),
        ("x", "loss", "training, last 20 steps"),
    ):
        differences = [run[key] - bf16[key] for run in compared.values()]
        axes.plot(differences, list(compared), marker, label=label)
    axes.invert_yaxis()
    axes.set(title="Losses minus bf16's after 200 steps", xlabel="nats per byte")
    plot.finish(axes, "lower right")
    return figure


# By file: the function that draws it. The experiments fill and draw their own pages.
PICTURES: dict[Path, Callable[[], Figure]] = {
    BENCH / "nvidia-h200-map.png": lambda: picture.draw(SECTIONS["map"]["rows"]),
    BENCH / "nvidia-h200-block.png": draw_block,
    errors.RESULTS.with_suffix(".png"): draw_errors,
    LLAMA / "compare-cpu.png": draw_runs_on_a_cpu,
    GRPO.with_suffix(".png"): lambda: grpo_plot.draw(json.loads(GRPO.read_text())),
}


def main() -> None:
    """Fills all tables, and draws all pictures."""
    argparse.ArgumentParser(
        prog="python -m docs.figures", description=__doc__.partition("\n")[0]
    ).parse_args()
    for page in PAGES:
        atomic.write(ROOT / page, filled(page))
    for file, draw in PICTURES.items():
        plot.save(draw(), file)
    evidence.draw()


if __name__ == "__main__":
    main()
