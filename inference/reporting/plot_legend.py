"""The legend of a plot, below it."""

from __future__ import annotations

from matplotlib.figure import Figure


def legend_below(figure: Figure) -> None:
    """Add a legend of the first panel below a figure, which grows if the legend has many rows."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        labels = [label if len(label) <= 40 else f"{label[:39]}…" for label in labels]
        ncols = min(4, max(1, 70 // (6 + max(map(len, labels)))))
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.17 * max(0, -(-len(labels) // ncols) - 2))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=ncols, handlelength=1.1, columnspacing=1.4, fontsize=9
        )
