"""The picture of the section ``map``: speedups over bf16 by the shape of a layer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from fbq_jax.bench.results import Row

# Speedups at the ends of the colors.
_SLOWEST, _FASTEST = 0.4, 1.6
_DARK = 0.4  # the distance from 1.0 from which colors are dark


def draw(rows: Sequence[Row]) -> Figure:
    """Draws a heat map of speedups for each recipe and M, with the line of 1.0.

    Args:
      rows: the rows of the section.
    """
    recipes = list(dict.fromkeys(row.what for row in rows if row.what != "bf16"))
    tokens = sorted({row.shape[0] for row in rows})
    widths = sorted({width for row in rows for width in row.shape[1:]})
    figure = Figure(figsize=(3 * len(tokens) + 1, 3.2 * len(recipes)))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(recipes), len(tokens), squeeze=False)
    norm = TwoSlopeNorm(1.0, _SLOWEST, _FASTEST)
    for name, axes in zip(recipes, panels, strict=True):
        speedups = {row.shape: row.ratio for row in rows if row.what == name}
        for M, axis in zip(tokens, axes, strict=True):
            image = _draw_panel(axis, _grid(speedups, M, widths), norm)
            axis.set(title=f"{name}, M = {M}", xlabel="N", ylabel="K")
            axis.set_xticks(range(len(widths)), map(str, widths), rotation=60)
            axis.set_yticks(range(len(widths)), map(str, widths))
    figure.colorbar(image, ax=panels, label="speedup vs bf16", shrink=0.6)
    figure.suptitle("Training steps of linear layers from K to N and back")
    return figure


def _grid(
    speedups: Mapping[tuple[int, ...], float], M: int, widths: Sequence[int]
) -> list[list[float]]:
    """Speedups by K and N; a layer and the one back have the same."""
    return [
        [speedups.get((M, min(K, N), max(K, N)), math.nan) for N in widths]
        for K in widths
    ]


def _draw_panel(axis: Any, grid: list[list[float]], norm: TwoSlopeNorm) -> Any:
    image = axis.imshow(grid, cmap="RdBu", norm=norm, origin="lower")
    for K, line in enumerate(grid):
        for N, speedup in enumerate(line):
            if not math.isnan(speedup):
                color = "white" if abs(speedup - 1.0) > _DARK else "black"
                label = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
                axis.text(N, K, f"{speedup:.2f}", **label)
    measured = [speedup for line in grid for speedup in line if not math.isnan(speedup)]
    if measured and min(measured) < 1.0 < max(measured):
        axis.contour(grid, levels=[1.0], colors="black", linewidths=2)
    return image
