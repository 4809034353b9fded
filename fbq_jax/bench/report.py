"""Tables of measured rows: plain text as they come, Markdown of a file."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fbq_jax.bench.results import Row


class Heading(NamedTuple):
    """What a section's columns hold.

    Attributes:
      title: of the table.
      shape: names of the sizes.
      rate: unit of ``Row.rate``.
      baseline: what the ratios are of.
      errors: against what the errors are.
    """

    title: str
    shape: str
    rate: str
    baseline: str
    errors: str


HEADINGS = {
    "gemm": Heading(
        "INT8 GEMM with 128 x 128 block scales, bf16 out",
        "M, N, K",
        "TFLOP/s",
        "bf16",
        "float32 output against the definition's",
    ),
    "quantize": Heading(
        "Quantization of bf16 in both layouts",
        "rows, columns",
        "TB/s",
        "copy",
        "share of codes, scales and metrics that differ from the definition's",
    ),
    "linear": Heading(
        "Linear layer, forward and backward: Y, dX and dW",
        "M, K, N",
        "TFLOP/s",
        "bf16",
        "against float32 products of the same operands",
    ),
}


class _Column(NamedTuple):
    title: str
    width: int
    cell: Callable[[Row], str]


def _columns(section: str) -> list[_Column]:
    heading = HEADINGS[section]
    columns = [
        _Column("what", 29, lambda row: row.what),
        _Column("by", 9, lambda row: row.implementation),
        _Column(heading.shape, 19, lambda row: ", ".join(map(str, row.shape))),
        _Column("fell back", 9, lambda row: _optional(row.fallback, "{:.1%}")),
        _Column("ms", 8, lambda row: f"{row.ms:.3f}"),
        _Column(heading.rate, 7, lambda row: f"{row.rate:.4g}"),
        _Column(f"/ {heading.baseline}", 7, lambda row: f"{row.ratio:.2f}"),
        _Column("in bursts", 9, lambda row: f"{row.burst_ratio:.2f}"),
        _Column("error", 35 if section == "linear" else 14, _errors),
    ]
    if section == "linear":
        compile_s = _Column(
            "first call, s", 13, lambda row: _optional(row.compile_s, "{:.1f}")
        )
        columns.append(compile_s)
    return columns


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


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
    columns = _columns(section)
    rows = [[column.title for column in columns], ["---"] * len(columns)]
    rows += [[column.cell(row) for column in columns] for row in content["rows"]]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([_caption(section, content), "", *lines])


def _caption(section: str, content: dict[str, Any]) -> str:
    heading = HEADINGS[section]
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    driver = f", driver {content['driver']}" if content["driver"] else ""
    quick = " A quick run: smaller sizes, fewer samples." if content["quick"] else ""
    return (
        f"**{heading.title}**, on {content['device']}{driver}, {content['date']}, "
        f"{versions}. Milliseconds are sustained, ratios over the {heading.baseline}'s "
        f"rate sustained and in bursts; errors: {heading.errors}.{quick}"
    )
