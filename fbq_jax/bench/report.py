"""Tables of measured rows: plain text row by row, and Markdown from a file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fbq_jax.bench.results import Row


class Heading(NamedTuple):
    """What a section measures."""

    title: str
    shape: str  # the names of the sizes in ``Row.shape``
    rate: str = "TFLOP/s"  # the unit of ``Row.rate``
    ratio: str | None = "speedup vs bf16"  # the title; None leaves out the ratios

    def names(self) -> dict[str, str]:
        """The titles of the columns."""
        own = {"shape": self.shape, "rate": self.rate, "ratio": self.ratio or ""}
        return {name: own.get(name, name) for name in _COLUMNS}


_LLAMA = "hidden, MLP, layers, batch"
_TRAINED = "vocabulary 32 000, sequences of 2048 tokens"
HEADINGS = {
    "step": Heading(
        "Training step of 8 linear layers, D to F to D, in Flax", "tokens, D, F"
    ),
    "map": Heading(
        "Where INT8 is faster: training steps of linear layers, K to N to K, in Flax",
        "M, K, N",
    ),
    "gemm": Heading("Block-scaled GEMM, bf16 out", "M, N, K"),
    "linear": Heading("Linear layer, forward and backward: Y, dX and dW", "M, K, N"),
    "grouped": Heading("Products of experts: Y, dX and dW", "M, K, N, experts"),
    "moe": Heading(
        "Mixture of experts, forward and backward, with router, dispatch and combine",
        "tokens, D, F, experts, top k",
    ),
    "serve": Heading(
        "Frozen layers of a Llama: the linear layers of 4 Transformer layers",
        "rows, hidden, MLP",
    ),
    # Of experiments.bench.
    "block": Heading(
        "Llama block, forward and backward, in sequences of 2048 tokens",
        "hidden, MLP, tokens",
    ),
    "profile": Heading(
        "Kernels of a Llama block, forward and backward",
        *("hidden, MLP, tokens", "%", None),
    ),
    "train": Heading(f"Optimizer step of a Llama, {_TRAINED}", _LLAMA),
    "accumulation": Heading(
        f"Optimizer step of a Llama that accumulates gradients, {_TRAINED}",
        "hidden, MLP, layers, sequences of a microbatch, microbatches",
    ),
    "invariant": Heading(
        "Invariant Llama: optimizer step, and decoding of 8 sequences", _LLAMA
    ),
    "scaling": Heading("Optimizer step of a Llama on several devices", _LLAMA),
    "parity": Heading(
        "50 steps of a small Llama on one device and on several", _LLAMA, ratio=None
    ),
}


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:{form}}"


# The columns, in order. A table has those in which some row has a value.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "name": lambda row: row.what,
    "layer": lambda row: row.layer or "",
    "backend": lambda row: row.implementation,
    "shape": lambda row: ", ".join(map(str, row.shape)),
    "input": lambda row: row.data or "",
    "mesh": lambda row: row.mesh or "",
    "fallback rate": lambda row: _number(row.fallback, ".1%"),
    "ms": lambda row: f"{row.ms:.3f}",
    "rate": lambda row: f"{row.rate:.4g}",
    "ratio": lambda row: f"{row.ratio:.2f}",
    "in bursts": lambda row: f"{row.burst_ratio:.2f}",
    "error": lambda row: " ".join(f"{name} {x:.1e}" for name, x in row.errors.items()),
    "k tokens/s": lambda row: _number(row.tokens_s, ".1f", 1e3),
    "efficiency": lambda row: _number(row.efficiency, ".1%"),
    "launches/layer": lambda row: _number(row.launches, ".1f"),
    "kernels, ms": lambda row: _number(row.kernels_ms, ".3f"),
    "gap, ms": lambda row: _number(row.gap_ms, ".3f"),
    "first call, s": lambda row: _number(row.compile_s, ".1f"),
    "of 1, 12 layers": lambda row: ", ".join(
        f"{value:.1f}" for value in (row.first_calls_s or {}).values()
    ),
    "conditionals": lambda row: _number(row.conditionals, ".0f"),
    "saved, kB/token": lambda row: _number(row.saved_bytes, ".1f", 1e3),
    "peak, GB": lambda row: _number(row.peak_bytes, ".1f", 1e9),
}
# Those that are printed while rows are measured, with their widths.
_PLAIN = {"name": 29, "backend": 9, "shape": 24, "fallback rate": 13, "ms": 9}
_PLAIN |= {"rate": 7, "ratio": 15, "error": 0}


def text_head(section: str) -> str:
    """The title and the head of the table that is printed while rows are measured."""
    heading = HEADINGS[section]
    return f"\n{heading.title}\n{_plain(heading.names())}"


def text_row(row: Row) -> str:
    """A row of that table."""
    return _plain({name: cell(row) for name, cell in _COLUMNS.items()})


def _plain(cells: Mapping[str, str]) -> str:
    line = "  ".join(f"{cells[name]:{width}}" for name, width in _PLAIN.items())
    return line.rstrip()


def markdown(sections: Mapping[str, Any]) -> str:
    """The Markdown tables of the sections that ``results.load`` returns.

    Sections of another version have a table, too, without the names of their sizes.
    """
    return "\n\n".join(
        _section(HEADINGS.get(name, Heading(name, "sizes", "rate")), content)
        for name, content in sections.items()
    )


def _section(heading: Heading, content: Mapping[str, Any]) -> str:
    """The table of a section, with where, when and with what it was measured."""
    is_map = heading is HEADINGS["map"]
    rows = content["rows"]
    head, cells = _map_table(rows) if is_map else _table(heading, rows)
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    driver = f", driver {content['driver']}" if content["driver"] else ""
    quick = " A quick run: smaller sizes, fewer samples." if content["quick"] else ""
    caption = f"{content['device']}{driver}, {content['date']}, {versions}.{quick}"
    table = [head, ["---"] * len(head), *cells]
    lines = "\n".join("| " + " | ".join(line) + " |" for line in table)
    return f"**{heading.title}**, on {caption}\n\n{lines}"


def _table(heading: Heading, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a section's table."""
    without = () if heading.ratio else ("ratio", "in bursts")
    shown = {
        name: cell
        for name, cell in _COLUMNS.items()
        if name not in without and any(map(cell, rows))
    }
    cells = [[cell(row) for cell in shown.values()] for row in rows]
    return [heading.names()[name] for name in shown], cells


def _map_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the map's table: speedups by M, one row per K and N."""
    names = list(dict.fromkeys(row.what for row in rows if row.what != "bf16"))
    tokens = sorted({row.shape[0] for row in rows})
    speedups = {(row.what, row.shape): f"{row.ratio:.2f}" for row in rows}
    head = ["K, N", *(f"{name}, M = {M}" for name in names for M in tokens)]
    cells = []
    for K, N in sorted({row.shape[1:] for row in rows}):
        found = (speedups.get((name, (M, K, N)), "") for name in names for M in tokens)
        cells.append([f"{K}, {N}", *found])
    return head, cells
