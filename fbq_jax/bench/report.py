"""Tables of measured rows: plain text as they come, Markdown of a file."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fbq_jax.bench.results import Row

_RATIOS = (
    "Milliseconds are sustained, ratios over the {baseline}'s rate sustained and in "
    "bursts; errors: {errors}."
)


class Heading(NamedTuple):
    """What a section's table holds.

    Attributes:
      title: of the table.
      shape: names of the sizes.
      rate: unit of ``Row.rate``; None where times are not the point.
      note: what the numbers are.
      baseline: what the ratios are of; None where there are none.
      error_width: characters of a plain table's errors; 0 for none.
      others: further columns.
    """

    title: str
    shape: str
    rate: str | None
    note: str
    baseline: str | None
    error_width: int = 0
    others: tuple[str, ...] = ()


HEADINGS = {
    "gemm": Heading(
        "INT8 GEMM with 128 x 128 block scales, bf16 out",
        "M, N, K",
        "TFLOP/s",
        _RATIOS.format(
            baseline="bf16",
            errors="outputs in float32 and in bf16 against the definition's in float32",
        ),
        "bf16",
        error_width=28,
    ),
    "quantize": Heading(
        "Quantization of bf16 in both layouts",
        "rows, columns",
        "TB/s",
        _RATIOS.format(
            baseline="copy",
            errors="share of codes, scales and metrics that differ from the "
            "definition's",
        ),
        "copy",
        error_width=14,
    ),
    "linear": Heading(
        "Linear layer, forward and backward: Y, dX and dW",
        "M, K, N",
        "TFLOP/s",
        _RATIOS.format(
            baseline="bf16", errors="against float32 products of the same operands"
        ),
        "bf16",
        error_width=35,
        others=("first call, s",),
    ),
    "recipes": Heading(
        "Recipes, in a linear layer, on activations with outliers",
        "M, K, N",
        "TFLOP/s",
        _RATIOS.format(
            baseline="bf16",
            errors="against float32 products of the same operands, of dX, and means of "
            "those of a token's row of Y and of an input channel's row of dW",
        )
        + " Saved is what the forward pass leaves of X for the backward pass.",
        "bf16",
        error_width=65,
        others=("X", "saved, kB a token"),
    ),
    "block": Heading(
        "Llama block, forward and backward, in sequences of 2048 tokens",
        "hidden, MLP, tokens",
        "TFLOP/s",
        _RATIOS.format(baseline="bf16", errors="against the bf16 block's")
        + " Saved is what the forward pass leaves for the backward pass, without "
        "weights; the peak has arguments and gradients, too.",
        "bf16",
        error_width=21,
        others=("first call, s", "saved, kB a token", "peak, GB"),
    ),
    "profile": Heading(
        "Kernels of a Llama block, forward and backward",
        "hidden, MLP, tokens",
        "%",
        "Milliseconds are those of one call on a rested card, of all kernels of a "
        "name together.",
        None,
    ),
    "train": Heading(
        "Optimizer step of a Llama, vocabulary 32 000, sequences of 2048 tokens",
        "hidden, MLP, layers, batch",
        "TFLOP/s",
        _RATIOS.format(
            baseline="bf16",
            errors="of the loss, in nats, and of the gradient's norm, to bf16's",
        ),
        "bf16",
        error_width=30,
        others=("first call, s", "peak, GB"),
    ),
    "scale": Heading(
        "Optimizer step of a Llama on several devices",
        "hidden, MLP, layers, batch",
        "TFLOP/s",
        "Milliseconds are sustained, ratios over bf16's rate sustained and in bursts. "
        "Batches, rates and tokens are of all devices together, in sequences of 2048 "
        "tokens with a vocabulary of 32 000; the peak is of one. Efficiency is against "
        "one device with the same batch for each.",
        "bf16",
        others=("mesh", "k tokens/s", "efficiency", "first call, s", "peak, GB"),
    ),
    "losses": Heading(
        "50 steps of a small Llama on one device and on several",
        "hidden, MLP, layers, batch",
        None,
        "Errors are the largest relative differences of a run's losses to those of one "
        "device, of the same run once more, and of eight whose weights were nudged by "
        "a float32's last bit. Sequences of 512 tokens, a vocabulary of 1024; the "
        "batch is of all devices together.",
        None,
        error_width=50,
        others=("mesh",),
    ),
}


class _Column(NamedTuple):
    title: str
    width: int
    cell: Callable[[Row], str]


_OTHERS = (
    _Column("mesh", 13, lambda row: row.mesh or ""),
    _Column("k tokens/s", 10, lambda row: _optional(row.tokens_s, 1e3)),
    _Column("efficiency", 10, lambda row: _share(row.efficiency)),
    _Column("X", 18, lambda row: row.data or ""),
    _Column("first call, s", 13, lambda row: _optional(row.compile_s, 1.0)),
    _Column("saved, kB a token", 17, lambda row: _optional(row.saved_bytes, 1e3)),
    _Column("peak, GB", 8, lambda row: _optional(row.peak_bytes, 1e9)),
)


def _columns(section: str) -> list[_Column]:
    heading = HEADINGS[section]
    columns = [
        _Column("what", 29, lambda row: row.what),
        _Column("by", 9, lambda row: row.implementation),
        _Column(heading.shape, 19, lambda row: ", ".join(map(str, row.shape))),
        _Column("fell back", 9, lambda row: _share(row.fallback)),
    ]
    if heading.rate is not None:
        columns += [
            _Column("ms", 8, lambda row: f"{row.ms:.3f}"),
            _Column(heading.rate, 7, lambda row: f"{row.rate:.4g}"),
        ]
    if heading.baseline is not None:
        columns += [
            _Column(f"/ {heading.baseline}", 7, lambda row: f"{row.ratio:.2f}"),
            _Column("in bursts", 9, lambda row: f"{row.burst_ratio:.2f}"),
        ]
    if heading.error_width:
        columns.append(_Column("error", heading.error_width, _errors))
    return columns + [other for other in _OTHERS if other.title in heading.others]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _optional(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:.1f}"


def _errors(row: Row) -> str:
    return " ".join(f"{name} {error:.1e}" for name, error in row.errors.items())


def text_head(section: str) -> str:
    """Title and head of a plain table."""
    head = "  ".join(f"{column.title:<{column.width}}" for column in _columns(section))
    return f"\n{HEADINGS[section].title}\n{head}"


def text_row(section: str, row: Row) -> str:
    """A row of a plain table, which needs no other row to be aligned."""
    cells = [f"{column.cell(row):<{column.width}}" for column in _columns(section)]
    return "  ".join(cells).rstrip()


def markdown(sections: dict[str, Any]) -> str:
    """The tables of the sections of a file, as ``results.load`` gives them."""
    return "\n\n".join(_markdown_table(*item) for item in sections.items())


def _markdown_table(section: str, content: dict[str, Any]) -> str:
    if section == "recipes":
        head, cells = _by_recipe(content["rows"])
    else:
        columns = _columns(section)
        head = [column.title for column in columns]
        cells = [[column.cell(row) for column in columns] for row in content["rows"]]
    rows = [head, ["---"] * len(head), *cells]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([_caption(section, content), "", *lines])


def _by_recipe(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the recipes' table: one for each, with its errors by X.

    Its time is the one on the X that takes longest; dX and the bytes are those of any.
    """
    of_recipe: dict[str, list[Row]] = {}
    for row in rows:
        of_recipe.setdefault(row.what, []).append(row)
    xs = list(dict.fromkeys(row.data or "" for row in rows))
    head = ["recipe", "by", "saved, kB a token", "ms", "/ bf16", "dX"]
    head += [f"{array}, {x}" for array in ("Y", "dW") for x in xs]
    cells = []
    for name, measured in of_recipe.items():
        slowest = min(measured, key=lambda row: row.ratio)
        by_x = {row.data: row.errors for row in measured}  # not all, if it was stopped
        errors: list[float | None] = [slowest.errors["dx"]]
        errors += [
            by_x[x][of] if x in by_x else None
            for of in ("token", "channel")
            for x in xs
        ]
        cells.append(
            [name, slowest.implementation, _optional(slowest.saved_bytes, 1e3)]
            + [f"{slowest.ms:.3f}", f"{slowest.ratio:.2f}"]
            + ["" if error is None else f"{error:.1e}" for error in errors]
        )
    return head, cells


def _caption(section: str, content: dict[str, Any]) -> str:
    heading = HEADINGS[section]
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    driver = f", driver {content['driver']}" if content["driver"] else ""
    quick = " A quick run: smaller sizes, fewer samples." if content["quick"] else ""
    return (
        f"**{heading.title}**, on {content['device']}{driver}, {content['date']}, "
        f"{versions}. {heading.note}{quick}"
    )
