"""Tables of measured rows: plain text row by row, and Markdown from a file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fbq_jax.bench.results import Row


class Heading(NamedTuple):
    """What a section's table shows.

    Attributes:
      title: the table's title.
      shape: the names of the sizes in ``Row.shape``.
      rate: the unit of ``Row.rate``; None leaves out the times.
      ratio: the title of ``Row.ratio``; None leaves out the ratios.
      note: what the numbers are.
      error_width: characters of the errors in a plain table; 0 leaves them out.
      has_layers: whether rows differ in ``Row.layer``.
      columns: the titles of further columns.
    """

    title: str
    shape: str
    rate: str | None
    ratio: str | None
    note: str
    error_width: int = 0
    has_layers: bool = False
    columns: tuple[str, ...] = ()


_SPEEDUP = "speedup vs bf16"
_TIMES = (
    "Times are sustained milliseconds per call. Speedups compare rates with bf16's, "
    "sustained and in bursts."
)
_UNROLLED = (
    "Layers run in a loop, or are compiled one by one (unrolled); each kind is "
    "compared with bf16 of the same kind."
)
_KERNEL_TIMES = (
    "Times are milliseconds of one call, after one to warm up. A row adds up all "
    "kernels of one name."
)
HEADINGS = {
    "step": Heading(
        "Training step of 8 linear layers, D to F to D, in Flax",
        "tokens, D, F",
        "TFLOP/s",
        _SPEEDUP,
        "This is what users get: forward, gradient and SGD update of 8 unrolled Flax "
        "layers in one compiled step, with state that moves. Times are sustained "
        "milliseconds of wall-clock per step. Speedups compare rates with bf16's, "
        "sustained and in bursts of single steps. The fallback rate is the layers' "
        "mean in the last step. Launches are the kernels of a step divided by its "
        "layers; the gap is the wall-clock time without the sum of the kernels. Errors "
        "compare the loss and the first layer's update with bf16's. Several "
        "programs are traced and compiled at the same time, which adds to first calls. "
        "The first calls of 1 and of 12 layers, traced, lowered, compiled and run, are "
        "timed in processes of their own. At conditionals of the compiled program, a "
        "GPU may wait for the host.",
        error_width=28,
        columns=(
            "launches/layer",
            "kernels, ms",
            "gap, ms",
            "first call, s",
            "of 1, 12 layers",
            "conditionals",
        ),
    ),
    "step_profile": Heading(
        "Kernels of a training step of 8 linear layers",
        "tokens, D, F",
        "%",
        None,
        "Single steps of the table of training steps, after continuous ones. "
        f"{_KERNEL_TIMES}",
    ),
    "map": Heading(
        "Where INT8 is faster: training steps of linear layers, K to N to K, in Flax",
        "M, K, N",
        "TFLOP/s",
        _SPEEDUP,
        "Steps are those of the table of training steps, of 8 layers, or of 2 where "
        "M K N is 2^36 or more. Times are sustained milliseconds of wall-clock per "
        "step, after a short warm-up. Errors compare the loss with bf16's.",
        error_width=12,
        columns=("first call, s",),
    ),
    "gemm": Heading(
        "Block-scaled GEMM, bf16 out",
        "M, N, K",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} Errors compare the float32 and the bf16 output with the reference "
        "in float32.",
        error_width=28,
    ),
    "quantize": Heading(
        "Quantization of bf16 in both layouts",
        "rows, columns",
        "TB/s",
        "rate vs copy",
        "Times are sustained milliseconds per call. A program makes several calls, so "
        "that the host's time to start it does not count. Ratios compare rates with "
        "the copy's, sustained and in bursts. The error is the share of codes, scales "
        "and metrics that differ from the reference.",
        error_width=14,
    ),
    "linear": Heading(
        "Linear layer, forward and backward: Y, dX and dW",
        "M, K, N",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} Errors compare with float32 products of the same operands. In rows "
        "of `nn.Dense` and `nnx.Linear` the state of the Flax layer moves, as in "
        "training; they are compared with bf16 in `nn.Dense`, bursts time calls, and "
        "they are compiled at the same time, which adds to first calls. "
        "Rows of `core` are core figures: threshold given, no state.",
        error_width=35,
        has_layers=True,
        columns=("first call, s",),
    ),
    "grouped": Heading(
        "Products of experts: Y, dX and dW of rows in groups",
        "M, K, N, experts",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} Here bf16 is a dense product of as many operations. Rows of Y, dX "
        "and dW are GEMMs alone, of codes in tiles or of bf16; rows of all three are a "
        "layer's, forward and backward, with quantization and the copies from tiles to "
        "rows. Errors compare columns at "
        "both ends with float32 products of the same operands.",
        error_width=35,
        has_layers=True,
        columns=("load",),
    ),
    "moe": Heading(
        "Mixture of experts, forward and backward, with router, dispatch and combine",
        "tokens, D, F, experts, top k",
        "TFLOP/s",
        _SPEEDUP,
        "Times are sustained milliseconds of wall-clock per step; bursts time calls. "
        "Work counts the experts' products. Errors compare with bf16's results.",
        error_width=30,
        columns=("first call, s",),
    ),
    "moe_scaling": Heading(
        "Mixture of experts on several devices, each with a part of the experts",
        "tokens, D, F, experts, top k",
        "TFLOP/s",
        None,
        "The steps of the table before. Times are sustained milliseconds of wall-clock "
        "per step. Tokens and rates are of all devices together. Efficiency compares "
        "with one device that has as many tokens as each of several. Errors compare "
        "with one device that has all tokens.",
        error_width=30,
        columns=("mesh", "k tokens/s", "efficiency", "first call, s"),
    ),
    "serve": Heading(
        "Frozen layers of a Llama: the linear layers of 4 Transformer layers",
        "rows, hidden, MLP",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} Norms and gates are included, attention is not. Up to 128 rows, a "
        "call decodes 8 tokens, one after the other, and times are those of one. "
        "Errors compare with bf16's output of the first.",
        error_width=9,
        columns=("first call, s",),
    ),
    "recipes": Heading(
        "Recipes, in a linear layer, on activations with outliers",
        "M, K, N",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} Errors compare with float32 products of the same operands: for dX "
        "the whole array, for Y the mean over its rows (tokens), for dW the mean over "
        "its rows (input channels). Saved is what the forward pass saves of X for the "
        "backward pass.",
        error_width=65,
        columns=("X", "saved, kB/token"),
    ),
    "block": Heading(
        "Llama block, forward and backward, in sequences of 2048 tokens",
        "hidden, MLP, tokens",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} Errors compare with the bf16 block. Saved is what the forward pass "
        "saves for the backward pass, without weights. Peak memory includes arguments "
        "and gradients.",
        error_width=21,
        columns=("first call, s", "saved, kB/token", "peak, GB"),
    ),
    "profile": Heading(
        "Kernels of a Llama block, forward and backward",
        "hidden, MLP, tokens",
        "%",
        None,
        _KERNEL_TIMES,
    ),
    "train": Heading(
        "Optimizer step of a Llama, vocabulary 32 000, sequences of 2048 tokens",
        "hidden, MLP, layers, batch",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} {_UNROLLED} Errors compare with bf16: the loss in nats, the "
        "gradient norm relatively.",
        error_width=30,
        columns=("first call, s", "peak, GB"),
    ),
    "accumulation": Heading(
        "Optimizer step of a Llama that accumulates gradients, vocabulary 32 000, "
        "sequences of 2048 tokens",
        "hidden, MLP, layers, sequences of a microbatch, microbatches",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} {_UNROLLED} Weights are quantized once a step, for all "
        "microbatches. Errors compare with bf16: the loss in nats, the gradient norm "
        "relatively.",
        error_width=30,
        columns=("first call, s", "peak, GB"),
    ),
    "scaling": Heading(
        "Optimizer step of a Llama on several devices",
        "hidden, MLP, layers, batch",
        "TFLOP/s",
        _SPEEDUP,
        f"{_TIMES} {_UNROLLED} Batches, rates and tokens are of all devices together, "
        "in sequences of 2048 tokens with a vocabulary of 32 000. Peak memory is of "
        "one device. Efficiency compares with one device that has the same batch per "
        "device.",
        columns=("mesh", "k tokens/s", "efficiency", "first call, s", "peak, GB"),
    ),
    "parity": Heading(
        "50 steps of a small Llama on one device and on several",
        "hidden, MLP, layers, batch",
        None,
        None,
        "Errors are the largest relative differences of a run's losses: to one device, "
        "to a repetition of the run, and to eight runs whose weights start one float32 "
        "ulp away. Sequences have 512 tokens, the vocabulary 1024; the batch is of all "
        "devices together.",
        error_width=50,
        columns=("mesh",),
    ),
}


class _Column(NamedTuple):
    title: str
    width: int
    cell: Callable[[Row], str]


_COLUMNS = (
    _Column("mesh", 13, lambda row: row.mesh or ""),
    _Column("k tokens/s", 10, lambda row: _number(row.tokens_s, 1e3)),
    _Column("efficiency", 10, lambda row: _percent(row.efficiency)),
    _Column("X", 18, lambda row: row.data or ""),
    _Column("load", 8, lambda row: row.data or ""),
    _Column("launches/layer", 14, lambda row: _number(row.launches, 1.0)),
    _Column("kernels, ms", 11, lambda row: _milliseconds(row.kernels_ms)),
    _Column("gap, ms", 7, lambda row: _milliseconds(row.gap_ms)),
    _Column("first call, s", 13, lambda row: _number(row.compile_s, 1.0)),
    _Column("of 1, 12 layers", 15, lambda row: _seconds(row.first_calls_s)),
    _Column("conditionals", 12, lambda row: _count(row.conditionals)),
    _Column("saved, kB/token", 15, lambda row: _number(row.saved_bytes, 1e3)),
    _Column("peak, GB", 8, lambda row: _number(row.peak_bytes, 1e9)),
)


def text_head(section: str) -> str:
    """The title and the head of a section's plain table."""
    head = "  ".join(f"{column.title:<{column.width}}" for column in _columns(section))
    return f"\n{HEADINGS[section].title}\n{head}"


def text_row(section: str, row: Row) -> str:
    """One row of a plain table; fixed widths align it with the head."""
    cells = [f"{column.cell(row):<{column.width}}" for column in _columns(section)]
    return "  ".join(cells).rstrip()


def markdown(sections: Mapping[str, Any]) -> str:
    """The Markdown tables of the sections that ``results.load`` returns."""
    return "\n\n".join(_markdown_table(*item) for item in sections.items())


def _columns(section: str) -> list[_Column]:
    heading = HEADINGS[section]
    columns = [_Column("name", 29, lambda row: row.what)]
    if heading.has_layers:
        columns.append(_Column("layer", 10, lambda row: row.layer or ""))
    columns += [
        _Column("backend", 9, lambda row: row.implementation),
        _Column(heading.shape, 19, lambda row: ", ".join(map(str, row.shape))),
        _Column("fallback rate", 13, lambda row: _percent(row.fallback)),
    ]
    if heading.rate is not None:
        columns += [
            _Column("ms", 8, lambda row: f"{row.ms:.3f}"),
            _Column(heading.rate, 7, lambda row: f"{row.rate:.4g}"),
        ]
    if heading.ratio is not None:
        columns += [
            _Column(heading.ratio, 15, lambda row: f"{row.ratio:.2f}"),
            _Column("in bursts", 9, lambda row: f"{row.burst_ratio:.2f}"),
        ]
    if heading.error_width:
        columns.append(_Column("error", heading.error_width, _errors))
    return columns + [column for column in _COLUMNS if column.title in heading.columns]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:.1f}"


def _seconds(values: Mapping[str, float] | None) -> str:
    return ", ".join(f"{value:.1f}" for value in (values or {}).values())


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _errors(row: Row) -> str:
    return " ".join(f"{name} {error:.1e}" for name, error in row.errors.items())


def _markdown_table(section: str, content: Mapping[str, Any]) -> str:
    if section == "recipes":
        head, cells = _recipes_table(content["rows"])
    elif section == "map":
        head, cells = _map_table(content["rows"])
    else:
        columns = _columns(section)
        head = [column.title for column in columns]
        cells = [[column.cell(row) for column in columns] for row in content["rows"]]
    return f"{_caption(section, content)}\n\n{table(head, cells)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _recipes_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the recipes' table: one per recipe, errors by X.

    The time is measured on the slowest X. The error of dX and the bytes are the same
    for every X.
    """
    of_recipe: dict[str, list[Row]] = {}
    for row in rows:
        of_recipe.setdefault(row.what, []).append(row)
    xs = list(dict.fromkeys(row.data or "" for row in rows))
    head = ["recipe", "backend", "saved, kB/token", "ms", _SPEEDUP, "dX"]
    head += [f"{array}, {x}" for array in ("Y", "dW") for x in xs]
    return head, [_recipe_cells(measured, xs) for measured in of_recipe.values()]


def _recipe_cells(rows: Sequence[Row], xs: Sequence[str]) -> list[str]:
    slowest = min(rows, key=lambda row: row.ratio)
    errors = {row.data: row.errors for row in rows}  # An interrupted run lacks some X.
    return [
        slowest.what,
        slowest.implementation,
        _number(slowest.saved_bytes, 1e3),
        f"{slowest.ms:.3f}",
        f"{slowest.ratio:.2f}",
        f"{slowest.errors['dx']:.1e}",
        *(
            f"{errors[x][name]:.1e}" if x in errors else ""
            for name in ("token", "channel")
            for x in xs
        ),
    ]


def _map_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the map's table: speedups by M, one row per K and N."""
    names = list(dict.fromkeys(row.what for row in rows if row.what != "bf16"))
    tokens = sorted({row.shape[0] for row in rows})
    speedups = {(row.what, row.shape): f"{row.ratio:.2f}" for row in rows}
    head = ["K, N", *(f"{name}, M = {M}" for name in names for M in tokens)]
    cells = [
        [
            f"{K}, {N}",
            *(speedups.get((name, (M, K, N)), "") for name in names for M in tokens),
        ]
        for K, N in sorted({row.shape[1:] for row in rows})
    ]
    return head, cells


def _caption(section: str, content: Mapping[str, Any]) -> str:
    heading = HEADINGS[section]
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    driver = f", driver {content['driver']}" if content["driver"] else ""
    quick = " A quick run: smaller sizes, fewer samples." if content["quick"] else ""
    return (
        f"**{heading.title}**, on {content['device']}{driver}, {content['date']}, "
        f"{versions}. {heading.note}{quick}"
    )
