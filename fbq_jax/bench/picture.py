"""The picture of the section ``recipes``: errors as outliers grow."""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.figure import Figure

from fbq_jax.bench.results import Row

_PANELS = {
    "token": "Y, mean over\ntokens",
    "dx": "dX",
    "channel": "dW, mean over\ninput channels",
}
_DASHES = ("-", "--", ":")


def draw(rows: Sequence[Row]) -> Figure:
    """Plots the errors of each recipe over the inputs.

    Args:
      rows: the rows of the section.
    """
    names = list(dict.fromkeys(row.what for row in rows))
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, len(_PANELS))
    for axis, (error, title) in zip(axes, _PANELS.items(), strict=True):
        for i, name in enumerate(names):
            of_recipe = [row for row in rows if row.what == name]
            axis.plot(
                [row.data for row in of_recipe],
                [row.errors[error] for row in of_recipe],
                color=colormaps["tab10"](i % 10),
                linestyle=_DASHES[i // 10 % len(_DASHES)],
                marker=".",
                label=name,
                zorder=len(names) - i,  # the first line on top
            )
        axis.set(title=title, yscale="log")
        axis.tick_params(axis="x", rotation=30)
        for tick in axis.get_xticklabels():
            tick.set_horizontalalignment("right")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="relative error")
    shape = " x ".join(map(str, rows[0].shape))
    figure.suptitle(f"Errors of a linear layer, M x K x N = {shape}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, labels=labels, loc="outside right upper")
    return figure
