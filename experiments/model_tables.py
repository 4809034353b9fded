"""Tables of models of users: of one trained elsewhere, of chosen recipes, of an 8B one.

Each is made from a folder of results, and empty without them.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments import result_files
from experiments.choice import PLANTED
from experiments.markdown import table
from experiments.result_files import Json, last_val_loss

# What a kernel's time is a part of, by the start of its name; the rest is XLA's.
_PARTS: dict[str, tuple[str, ...]] = {
    "products in INT8": ("kernel_mosaic",),
    "products in bf16": ("nvjet", "gemm_fusion", "cublas", "sm90_xmma"),
    "attention (cuDNN)": ("cudnn", "_ZN5cudnn"),
    "quantization": ("quantize",),
    "collectives (NCCL)": ("nccl",),
}
_REST = "optimizer, loss, residual sums, copies (XLA)"
_GAPS = "between kernels, or less where kernels overlap"
_STEPS = "llama-3-8b", "llama-3-8b-2"  # with one sequence, and with two
# Of the schemes in the results, those that the page compares.
_SCHEMES = (
    "blocks",
    "blocks, second term for 20%",
    "row blocks of X",
    "row blocks of X, second term for 20%",
    "row blocks of X, second term for 10% of W",
    "row blocks of X, blocks and rows of W",
    "row blocks of X and W",
    "only X, row blocks",
    "only W, blocks",
    "only W, row blocks",
)
_DEVICES = "llama-3-8b-fsdp-1", "llama-3-8b-fsdp-2", "llama-3-8b-fsdp-4"


def _rows(results: Path, name: str) -> list[Json]:
    return result_files.one(results, name).get("rows", [])


def added_losses(results: Path) -> str:
    """What recipes add to a model's loss without training, and after training it."""
    added = {row["what"]: row for row in _rows(results, "losses")}
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for row in _rows(results, "tuned"):
        losses[row["what"]][row["seed"]] = last_val_loss(row)
    rows = []
    for name, row in added.items():
        if name != "bf16":
            of = losses.get("auto" if name == "chosen" else name, {})
            cell = f"{row['added']:+.4f} ± {row['standard_error']:.4f}"
            rows.append([name, cell, _of_seeds({**losses, name: of}, name)])
    return table(("recipe", "not trained", "trained, by seed"), rows)


def schemes(results: Path, shown: Sequence[str] = _SCHEMES) -> str:
    """What schemes add to a model's loss, and their errors by planted outliers."""
    losses = {row["what"]: row["added"] for row in _rows(results, "schemes")}
    errors = {row["what"]: row["errors"] for row in _rows(results, "scheme-errors")}
    if not errors:
        return ""
    columns = "INT8", "FP8"
    rows = []
    for scheme in shown:
        cells = [scheme]
        for codes in columns:
            name = f"{codes}: {scheme}"
            cells.append(f"{losses[name]:+.4f}" if name in losses else "")
            cells.append(", ".join(f"{x:.3f}" for x in errors[name].values()))
        rows.append(cells)
    sizes = ", ".join(next(iter(errors.values())))
    head = ((f"{codes}, nats", f"errors at {sizes}") for codes in columns)
    return table(("scheme", *itertools.chain(*head)), rows)


def steps(results: Path, files: Sequence[str] = _STEPS) -> str:
    """Memory and time of steps of a whole model, over the fastest in bf16 of a file."""
    rows = []
    for found in (_rows(results, name) for name in files):
        bf16 = [row for row in found if row["what"].startswith("bf16")]
        fastest = max((row.get("tokens_per_s", 0.0) for row in bf16), default=0.0)
        for row in found:
            cells = [row["what"], str(row["batch"]), f"{row['peak_bytes'] / 1e9:.0f}"]
            if speed := row.get("tokens_per_s"):
                cells += [f"{row['ms']:.0f}", f"{speed:,.0f}"]
                cells += [f"{row['model_tflops']:.0f}", f"{speed / fastest:.2f}"]
            else:
                cells.append("does not fit")
            rows.append(cells)
    head = "step", "sequences", "peak GB", "ms", "tokens/s", "model TFLOP/s"
    return table((*head, "over the fastest bf16"), rows)


def devices(results: Path) -> str:
    """What several GPUs keep of the speed of one, with as many sequences each."""
    alone = {row["what"]: row["tokens_per_s"] for row in _rows(results, _DEVICES[0])}
    rows = []
    for row in (row for name in _DEVICES for row in _rows(results, name)):
        each = row["tokens_per_s"] / row["devices"]
        cells = [row["what"], str(row["devices"]), f"{row['peak_bytes'] / 1e9:.0f}"]
        cells += [
            f"{row['ms']:.0f}",
            f"{each:,.0f}",
            f"{each / alone[row['what']]:.1%}",
        ]
        rows.append(cells)
    head = "step", "GPUs", "peak GB of one", "ms", "tokens/s of one", "efficiency"
    return table(head, rows)


def parts(results: Path) -> str:
    """The milliseconds of the parts of one step of the fastest bf16 row and others."""
    rows = [row for row in _rows(results, _STEPS[0]) if row.get("kernels")]
    bf16 = [row for row in rows if row["what"].startswith("bf16")]
    others = [row for row in rows if row["what"].endswith("remat none, fp8 moments")]
    fastest = sorted(bf16, key=lambda row: row["ms"])[:1]
    return _table_of_parts({row["what"]: row for row in fastest + others})


def parts_by_devices(results: Path) -> str:
    """The milliseconds of the parts of a step on several GPUs."""
    rows = [row for name in _DEVICES for row in _rows(results, name)]
    return _table_of_parts({f"{r['what']}, {r['devices']} GPUs": r for r in rows})


def _table_of_parts(rows: dict[str, Json]) -> str:
    columns = [dict(_parts(row)) for row in rows.values()]
    cells = [
        [part, *(f"{column.get(part, 0.0):.0f}" for column in columns)]
        for part in (*_PARTS, _REST, _GAPS)
        if any(part in column for column in columns)
    ]
    cells += [["the step", *(f"{row['ms']:.0f}" for row in rows.values())]] * bool(rows)
    return table(("ms", *rows), cells)


def _parts(row: Json) -> Iterator[tuple[str, float]]:
    times: dict[str, float] = defaultdict(float)
    for name, ms in row["kernels"].items():
        of = (part for part, starts in _PARTS.items() if name.startswith(starts))
        times[next(of, _REST)] += ms
    yield from times.items()
    yield _GAPS, row["ms"] - sum(times.values())


def planted(results: Path) -> str:
    """Losses and speeds after training on from planted outliers, by recipe."""
    first, *runs = _rows(results, "planted") or [{}]
    if not runs:
        return ""
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    speeds: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        losses[run["recipe"]][run["seed"]] = run["loss"]
        speeds[run["recipe"]].append(run["tokens_per_s"])
    rows = [
        [recipe, _of_seeds(losses, recipe), f"{np.mean(of):,.0f}"]
        for recipe, of in speeds.items()
    ]
    block: dict[bool, list[float]] = defaultdict(list)
    for layer, *_, candidates, _, _, _ in first["report"]["layers"]:
        if layer.endswith("/down"):
            number = int(layer.partition("/")[0].rpartition("_")[2])
            block[number in PLANTED].append(candidates[0][1])
    about = (
        f"Errors of Y with `block` in `down`: {min(block[True]):.3f} and "
        f"{max(block[True]):.3f} where outliers are planted, {min(block[False]):.3f} "
        f"to {max(block[False]):.3f} in the other layers."
    )
    return f"{table(('recipe', 'loss', 'tokens/s'), rows)}\n\n{about}"


def _of_seeds(losses: dict[str, dict[int, float]], recipe: str) -> str:
    """The losses of bf16, or a recipe's minus those of the same seeds."""
    if recipe == "bf16":
        return ", ".join(f"{x:.4f}" for x in losses[recipe].values())
    differences = result_files.differences_from_bf16(losses, recipe)
    return ", ".join(f"{x:+.4f}" for x in differences)


def predictions(results: Path) -> str:
    """The gradients of models: in float, and predicted and measured with rules."""
    rows = []
    for row in _rows(results, "speed"):
        report, predicted = row["report"], row["predicted_ms"]
        measured, of_float = report["chosen_ms"], report["float_ms"]
        chosen = {
            layer[0].rpartition("layers/")[2]: layer[-3] for layer in report["layers"]
        }
        names = ", ".join(f"{path}: {name or 'float'}" for path, name in chosen.items())
        cells = [row["model"], names, f"{of_float:.2f}"]
        if measured:
            cells += [f"{predicted:.2f}", f"{measured:.2f}"]
            cells.append(f"{predicted / measured - 1:+.1%}")
            cells.append(f"{of_float / measured:.2f}")
        rows.append(cells)
    head = "model", "chosen", "float, ms", "predicted", "measured", "difference"
    return table((*head, "speedup"), rows)


def pretraining(results: Path) -> str:
    """The losses and speeds of pretraining by recipe, and with those chosen."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in _rows(results, "pretraining"):
        size, recipe = row["size"], row["recipe"]
        of_size = losses.setdefault(size, defaultdict(dict))
        of_size[recipe][row["seed"]] = last_val_loss(row)
        if "tokens_per_s" in row:  # runs that shared a GPU have none
            speeds[size, recipe].append(row["tokens_per_s"])
    rows = []
    for (size, recipe), of in speeds.items():
        speed, over = np.mean(of), np.mean(of) / np.mean(speeds[size, "bf16"])
        cells = _of_seeds(losses[size], recipe), f"{speed:,.0f}", f"{over:.2f}"
        rows.append([size, recipe, *cells])
    head = "parameters", "recipe", "validation loss", "tokens/s", "speedup vs bf16"
    return table(head, rows)
