"""Fills tables of the documents, and draws their pictures, from committed JSON.

    python -m docs.figures

A table's place on a page is `<!-- name -->` to `<!-- end -->`.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.llama import atomic, plot
from examples.llama.experiments import __main__ as experiments
from examples.llama.experiments import result_files, run_tables
from examples.llama.experiments.markdown import fill, table
from fbq_jax import recipes
from fbq_jax.bench import (
    block_picture,
    compiled,
    errors,
    map_picture,
    models,
    picture,
    report,
    tpu,
)
from fbq_jax.bench import results as bench_results
from fbq_jax.bench.results import Row

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "fbq_jax/bench/results"
LLAMA = ROOT / "examples/llama/results"
EXPERIMENTS = experiments.RESULTS
SECTIONS = bench_results.load(BENCH / "nvidia-h200.json")
H100 = bench_results.load(BENCH / "nvidia-h100-80gb-hbm3.json")
COMPILED, COMPILED_TPU, ERRORS, MODELS = (
    json.loads((BENCH / f"{name}.json").read_text())
    for name in ("compiled", "compiled-tpu", "errors-cpu", "models")
)

# The rows of the tables of speedups: the title, and the section and shape that measure
# it.
SPEEDS = (
    ("training step of `nn.Dense`, 4096 to 4096 channels", "step", (8192, 4096, 4096)),
    ("training step of `nn.Dense`, 2048 to 2048", "step", (8192, 2048, 2048)),
    ("training step of `nn.Dense`, 4096 to 14336", "step", (8192, 4096, 14336)),
    ("Llama block of 8192 channels", "block", (8192, 28672, 16384)),
    ("Llama block of 4096 channels", "block", (4096, 14336, 16384)),
    ("Llama block of 2048 channels", "block", (2048, 5632, 16384)),
    ("optimizer step of a Llama, 4 layers of 4096", "train", (4096, 14336, 4, 8)),
    ("optimizer step of a Llama, 22 layers of 2048", "train", (2048, 5632, 22, 4)),
    ("four microbatches, 22 layers of 2048", "accumulation", (2048, 5632, 22, 4, 4)),
)
# Rows of layers that are not in a loop have these titles, and end with this.
UNROLLED = ", unrolled"
# The titles of rows of both kinds.
BOTH_KINDS = {
    name + kind: title + kind
    for name, title in (("bf16", "bf16"), ("fallback", "`fallback`"))
    for kind in ("", UNROLLED)
}
BLOCK = (4096, 14336, 16384)


def rows(
    section: str, shape: Iterable[int], sections: Mapping[str, Any] = SECTIONS
) -> dict[str, Row]:
    """The rows of a section with this shape, by name; empty without the section."""
    of_section = sections[section]["rows"] if section in sections else []
    return {row.what: row for row in of_section if row.shape == tuple(shape)}


def speed() -> str:
    """Speedups over bf16 of what users run, on an H200."""
    return _speeds(SECTIONS)


def speed_h100() -> str:
    """Those that are measured on an H100."""
    return _speeds(H100)


def _speeds(sections: Mapping[str, Any]) -> str:
    names = ("fallback", "row_block_lhs", "fp8_row_block_lhs", "block")
    programs = (*names, "Flax Fp8DotGeneral")
    cells = [
        [title + kind, *(ratio(measured.get(what + kind)) for what in programs)]
        for title, section, shape in SPEEDS
        for kind in ("", UNROLLED)
        if names[0] + kind in (measured := rows(section, shape, sections))
    ]
    return table(("", *(f"`{name}`" for name in names), "Flax's FP8"), cells)


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
    cells = []
    for recipe, of_recipe in of_seeds.items():
        own = [runs[f"{recipe}-{seed}"] for seed in of_recipe]
        name, compared = recipe, ("", "")
        if recipe != "bf16":
            difference = run_tables.relative(of_seeds, recipe, "bf16")
            name, compared = f"`{recipe}`", run_tables.mean_and_interval(difference)
        cells.append(
            [
                name,
                f"{statistics.fmean(of_recipe.values()):.4f}",
                *compared,
                f"{statistics.median(run['tokens_per_s'] for run in own):,.0f}",
                f"{max(run['peak_bytes'] for run in own) / 1e9:.1f}",
            ]
        )
    head = "recipe", "validation loss", "vs bf16", "95 % interval", "tokens/s"
    return table((*head, "peak GB"), cells)


def measured() -> str:
    """What is measured of every recipe on an H200, in one row each."""
    single = result_files.runs(EXPERIMENTS, "parity")
    single["chance-0"] = single["bf16-1"]  # compared with bf16-0
    # Where a recipe has several seeds, their mean counts.
    trained = result_files.runs(EXPERIMENTS / "seeds", "parity"), single
    tuned = result_files.losses_by_model(result_files.runs(EXPERIMENTS, "outliers"))
    layers: dict[str, list[Row]] = {}
    for row in SECTIONS["recipes"]["rows"]:
        layers.setdefault(row.what, []).append(row)

    def training(name: str) -> tuple[str, str]:
        """The speedup and the loss over bf16 of the same seeds, means of all seeds."""
        found = next((runs for runs in trained if f"{name}-0" in runs), None)
        if found is None:
            return "", ""
        loss, speed = (
            run_tables.relative(run_tables.by_seed(found, value), name, "bf16").mean()
            for value in (result_files.last_val_loss, lambda run: run["tokens_per_s"])
        )
        return f"{1 + speed:.2f}", f"{loss:+.2%}"

    def cells(name: str) -> Iterator[str]:
        yield f"`{name}`"
        slowest = min(layers.get(name, []), key=lambda row: row.ratio, default=None)
        yield ratio(slowest)
        yield "" if slowest is None else f"{(slowest.saved_bytes or 0) / 1e3:.1f}"
        yield from training(name)
        for model in ("58", "606", "6559"):
            found = result_files.differences_from_bf16(tuned[model], name)
            yield f"{found.mean():+.4f}" if len(found) else ""

    head = (
        *("recipe", "layer: speedup", "saved of X, kB/token"),
        *("training: speedup", "loss vs bf16"),
        *("fine-tuning, 58", "606", "6559"),
    )
    names = (*recipes.NAMED, "fp8_delayed", "fp8_current")
    chance = ["bf16, another seed", "", "", *training("chance")]
    return table(head, [chance, *(list(cells(name)) for name in names)])


def outliers() -> str:
    """Errors of Y and dW by where the outliers are, by the reference."""
    columns = [
        ("Y, Gaussian", "Gaussian", "y_token"),
        ("Y, 1/8 of blocks", "up to 606", "y_token"),
        ("Y, 1/2 of blocks", "606, 1/2 of blocks", "y_token"),
        ("Y, W has them", "W up to 606", "y_channel"),
        ("dX, dY has them", "dY up to 606", "dx_token"),
        ("dW, 1/8 of blocks", "up to 606", "dw_in"),
        ("dW, 1/2 of blocks", "606, 1/2 of blocks", "dw_in"),
    ]
    found: dict[str, dict[str, Any]] = {}
    for row in ERRORS["recipe_errors"]:
        found.setdefault(row["what"], {})[row["data"]] = row["errors"]
    cells = [
        [f"`{name}`", *(f"{by_data[x][error]:.3f}" for _, x, error in columns)]
        for name, by_data in found.items()
        if name in recipes.NAMED
    ]
    return table(("recipe", *(title for title, *_ in columns)), cells)


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


def gpus() -> str:
    """Estimated speedups of GPUs that were not measured."""
    by_card: dict[str, list[str]] = {}
    for row in COMPILED["layers"]:
        low, high = sorted(row["speedup"])
        by_card.setdefault(row["card"], []).append(f"{low:.2f} to {high:.2f}")
    shapes = [f"{K} to {N} channels" for _, K, N in compiled.LAYERS]
    return table(("GPU", *shapes), [[card, *cells] for card, cells in by_card.items()])


def tpus() -> str:
    """Estimated cycles of a linear layer on TPUs, over bf16's."""
    cycles: dict[str, dict[str, float]] = {}
    for row in COMPILED_TPU["tpu_layers"]:
        total = row["xla_cycles"] + sum(row["kernel_cycles"].values())
        cycles.setdefault(row["generation"], {})[row["what"]] = total
    names = [name for name in next(iter(cycles.values())) if name != "bf16"]
    cells = [
        [name, *(f"{of_tpu[name] / of_tpu['bf16']:.2f}" for of_tpu in cycles.values())]
        for name in names
    ]
    return table(("recipe", *cycles), cells)


def libraries() -> str:
    """Speedups of linear layers over bf16, by this and by other libraries."""
    shapes = ((8192, 4096, 4096), (8192, 4096, 14336))
    names = ("fallback", "block", "Flax Fp8DotGeneral", "Qwix INT8", "AQT INT8")
    cores = {
        (row.what, row.shape): row
        for row in SECTIONS["linear"]["rows"]
        if row.layer == "core" and row.implementation != "triton"
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


def experts() -> str:
    """The losses of a mixture of experts on a CPU and on a GPU."""
    cells = []
    for machine, name in (("CPU", "cpu"), ("H200", "h200")):
        runs = json.loads((LLAMA / f"compare-experts-{name}.json").read_text())["runs"]
        base = runs["bf16"]
        for recipe, run in runs.items():
            cells.append([machine, recipe])
            for key in ("loss", "val_loss"):
                cells[-1] += [f"{run[key]:.3f}", f"{run[key] / base[key] - 1:+.2%}"]
    head = ("training loss", "vs bf16", "validation loss", "vs bf16")
    return table(("", "recipe", *head), cells)


def runs_on_a_cpu() -> str:
    """The losses of every recipe after a short run, and what chance changes."""
    compared, chance = (
        json.loads((LLAMA / f"{name}-cpu.json").read_text())["runs"]
        for name in ("compare", "chance")
    )
    runs = dict(compared)
    for name, run in chance.items():
        runs[f"bf16, `--saved-bits {name.removeprefix('bf16-')}`"] = run
    base = compared["bf16"]["val_loss"]
    cells = [
        [
            name,
            f"{run['loss']:.3f}",
            f"{run['val_loss']:.3f}",
            f"{run['val_loss'] / base - 1:+.2%}",
        ]
        for name, run in runs.items()
    ]
    return table(("recipe", "training loss", "validation loss", "vs bf16"), cells)


# The pages with places for tables.
PAGES = (
    "README.md",
    "docs/choose-a-recipe.md",
    "docs/evidence/recipes-on-a-cpu.md",
    "docs/integrations/maxtext.md",
    "docs/integrations/public-models.md",
    "docs/performance/errors.md",
    "docs/performance/experts.md",
    "docs/performance/frozen-layers.md",
    "docs/performance/h100.md",
    "docs/performance/kernels.md",
    "docs/performance/map.md",
    "docs/performance/profile.md",
    "docs/performance/results.md",
    "docs/performance/tpus.md",
)


def tables() -> dict[str, str]:
    """All tables of these pages, by the names of their places."""
    summaries = (speed, losses, measured, outliers, memory, batches, gpus, tpus)
    others = (speed_h100, loops, efficiencies, libraries, maxtext, experts)
    sections = SECTIONS.items()
    return {
        **{name: report.markdown({name: section}) for name, section in sections},
        **{
            f"h100_{name}": report.markdown({name: section})
            for name, section in H100.items()
        },
        **compiled.tables(COMPILED),
        "compiled_tpu": tpu.markdown(COMPILED_TPU),
        "errors": errors.markdown(ERRORS),
        "models": models.markdown(MODELS),
        **{f.__name__: f() for f in (*summaries, *others, runs_on_a_cpu)},
    }


def filled(page: str) -> str:
    """A page with its tables."""
    return fill((ROOT / page).read_text(), tables().__getitem__)


def draw_errors() -> Figure:
    """Errors of Y, dX and dW as outliers of X grow, by the reference."""
    keys = {"token": "y_token", "dx": "dx_token", "channel": "dw_in"}
    template = SECTIONS["recipes"]["rows"][0]
    of_x = [
        dataclasses.replace(
            template,
            what=row["what"],
            data=row["data"],
            shape=tuple(ERRORS["shape"]),
            errors={name: row["errors"][key] for name, key in keys.items()},
        )
        for row in ERRORS["recipe_errors"]
        if "W" not in row["data"] and "dY" not in row["data"]
    ]
    return picture.draw(of_x)


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
    BENCH / "nvidia-h200-recipes.png": lambda: picture.draw(
        SECTIONS["recipes"]["rows"]
    ),
    BENCH / "nvidia-h200-map.png": lambda: map_picture.draw(SECTIONS["map"]["rows"]),
    BENCH / "nvidia-h200-block.png": lambda: block_picture.draw(
        list(rows("block", BLOCK).values())
    ),
    BENCH / "errors-cpu.png": draw_errors,
    LLAMA / "compare-cpu.png": draw_runs_on_a_cpu,
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
    for folder in experiments.PAGES:
        experiments.main(["draw", "--results", str(folder)])


if __name__ == "__main__":
    main()
