"""Heat maps of a sweep: a map shows two axes, and there is one map for each combination of the other axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from data.files import atomic_write
from inference.tuning.grid import Axis

METRICS = {
    "acceptance_length": "Acceptance length, tokens per base forward",
    "speedup": "Speed-up, times plain decoding",
}
MAX_COLUMNS = 4  # maps next to each other
MAX_VALUE_LENGTH = 16  # longer values keep their end, in which file names differ


@dataclass(frozen=True)
class Panel:
    """One map.

    Args:
        title: The values of the axes that the map does not show.
        rows, columns: The axes of the map; for a sweep of a single axis, the columns are an axis without a name.
        values: (rows, columns), NaN where nothing was measured.
    """

    title: str
    rows: Axis
    columns: Axis
    values: np.ndarray


def panels(axes: Sequence[Axis], measured: Mapping[tuple[str, ...], float | None]) -> list[Panel]:
    """Cut a grid into maps of its first two axes, skipping axes with a single value where possible.

    Args:
        axes: Axes of the grid.
        measured: The measurement at each place of the grid; places may be missing.
    """
    varying = [axis for axis in axes if len(axis.values) > 1]
    shown = [*varying[:2], *(axis for axis in axes if axis not in varying[:2])][:2]
    shown += [Axis("", ("",))] * (2 - len(shown))
    others = [axis for axis in axes if axis not in shown]
    result = []
    for choice in product(*(axis.values for axis in others)):
        fixed = {axis.name: value for axis, value in zip(others, choice, strict=True)}
        values = np.full([len(axis.values) for axis in shown], np.nan)
        for position in np.ndindex(values.shape):
            place = fixed | {axis.name: axis.values[index] for axis, index in zip(shown, position, strict=True)}
            number = measured.get(tuple(place[axis.name] for axis in axes))
            values[position] = np.nan if number is None else number
        title = ", ".join(f"{axis.name} {short(fixed[axis.name])}" for axis in others if len(axis.values) > 1)
        result.append(Panel(title, shown[0], shown[1], values))
    return result


def draw(metric: str, drafter: str, maps: Sequence[Panel], path: Path) -> None:
    """Write the maps of one of `METRICS` as a PNG file, all with the same colour scale; the best cell has a frame."""
    numbers = np.concatenate([panel.values.ravel() for panel in maps])
    numbers = numbers[np.isfinite(numbers)]
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 1.0)
    colours, norm, legend = scale(metric, low, high)
    colour_map = matplotlib.colormaps[colours]
    num_columns = min(MAX_COLUMNS, len(maps))
    num_rows = -(-len(maps) // num_columns)
    cells_high, cells_wide = maps[0].values.shape
    width, height = num_columns * (1.3 + 0.62 * cells_wide) + 0.9, num_rows * (1.0 + 0.42 * cells_high) + 0.6
    with matplotlib.rc_context({"font.size": 9.5, "text.parse_math": False, "axes.titlesize": 10}):
        figure = Figure(figsize=(max(5.0, width), max(2.2, height)), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes in grid.flat[len(maps) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, maps, strict=False):
            image = axes.imshow(panel.values, cmap=colour_map, norm=norm, aspect="auto")
            _label(axes, panel, colour_map, norm, best=high)
        figure.suptitle(f"{drafter}: {METRICS[metric]}", fontsize=11, fontweight="bold", x=0.01, ha="left")
        figure.colorbar(image, ax=grid, shrink=0.9, pad=0.02, label=legend)
        with atomic_write(path) as new:
            figure.savefig(new, dpi=160, format="png")


def _label(axes: Axes, panel: Panel, colour_map: Colormap, norm: Normalize, best: float) -> None:
    """Write the axes' values and the cells' numbers into a map, and frame the best cell."""
    axes.set(title=panel.title, xlabel=panel.columns.name, ylabel=panel.rows.name)
    axes.set_xticks(range(len(panel.columns.values)), [short(value) for value in panel.columns.values])
    axes.set_yticks(range(len(panel.rows.values)), [short(value) for value in panel.rows.values])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row, column in np.argwhere(np.isfinite(panel.values)):
        value = panel.values[row, column]
        red, green, blue, _ = colour_map(norm(value))
        is_light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
        weight = "bold" if value == best else "normal"
        ink = "black" if is_light else "white"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, weight=weight)
        if value == best:
            axes.add_patch(Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, fill=False, ec=ink, lw=1.6))


def scale(metric: str, low: float, high: float) -> tuple[str, Normalize, str]:
    """Choose the colour map between the smallest and the largest number, and its legend.

    A speed-up above 1 is green and one below 1 is purple. If all speed-ups are on the same side of 1, the whole range
    of that colour is used.
    """
    ends = Normalize(low, max(high, low + 1e-3))
    if metric != "speedup":
        return "viridis", ends, ""
    if high < 1:
        return "Purples_r", ends, "none is faster"
    if low > 1:
        return "Greens", ends, "all are faster"
    return "PRGn", CenteredNorm(1, max(1 - low, high - 1, 1e-3)), "white: equally fast"


def short(value: str) -> str:
    """Shorten a long value to its end."""
    return value if len(value) <= MAX_VALUE_LENGTH else f"…{value[1 - MAX_VALUE_LENGTH :]}"
