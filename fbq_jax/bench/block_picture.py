"""The picture of the section ``block``: time and memory of Llama blocks."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fbq_jax.bench.results import Row


def draw(rows: Sequence[Row]) -> Figure:
    """Draws bars of the time and of what is saved, with a row for each size.

    Args:
      rows: the rows of the section.
    """
    shapes = list(dict.fromkeys(row.shape for row in rows))
    counts = [sum(row.shape == shape for row in rows) for shape in shapes]
    figure = Figure(figsize=(10, 0.4 * len(rows) + 1.2 * len(shapes)))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(shapes), 2, squeeze=False, height_ratios=counts)
    for shape, (time, memory) in zip(shapes, panels, strict=True):
        of_shape = [row for row in rows if row.shape == shape]
        names = [row.what for row in of_shape]
        hidden, mlp, tokens = shape
        time.set(title=f"hidden {hidden}, MLP {mlp}, {tokens} tokens", xlabel="ms")
        memory.set(xlabel="saved for the backward pass, kB/token")
        for axis, values in (
            (time, [row.ms for row in of_shape]),
            (memory, [(row.saved_bytes or 0.0) / 1e3 for row in of_shape]),
        ):
            of_bf16 = [name.startswith("bf16") for name in names]
            colors = ["gray" if is_bf16 else "tab:blue" for is_bf16 in of_bf16]
            bars = axis.barh(names, values, color=colors)
            axis.bar_label(bars, fmt="%.1f", padding=3)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.spines[["top", "right"]].set_visible(False)
        memory.set_yticklabels([])
    return figure
