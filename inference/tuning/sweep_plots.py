"""Heat maps of a sweep: two axes a panel, a panel for each choice of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure

from inference.tuning.grid import Axis

METRICS = {
    "acceptance_length": "Acceptance length, tokens per base forward",
    "speedup": "Speed-up, times the base alone",
}
MAX_COLUMNS = 4  # panels side by side
MAX_NAME = 16  # characters of a value, the end of which tells files apart


@dataclass(frozen=True)
class Panel:
    """One map.

    Args:
        title: What the other axes are here.
        rows, columns: The axes of the map; a sweep of one axis has one column without a name.
        values: (rows, columns), NaN where nothing was measured.
    """

    title: str
    rows: Axis
    columns: Axis
    values: np.ndarray


def panels(axes: Sequence[Axis], measured: Mapping[tuple[str, ...], float | None]) -> list[Panel]:
    """Cut a grid into maps of its first two axes; axes of one value make no map of their own.

    Args:
        axes: Of the grid.
        measured: A number for each place; places without one stay empty.
    """
    wide = [axis for axis in axes if len(axis.values) > 1]
    spread = [*wide[:2], *(axis for axis in axes if axis not in wide[:2])][:2]
    spread += [Axis("", ("",))] * (2 - len(spread))
    others = [axis for axis in axes if axis not in spread]
    found = []
    for choice in product(*(axis.values for axis in others)):
        fixed = {axis.name: value for axis, value in zip(others, choice, strict=True)}
        values = np.full([len(axis.values) for axis in spread], np.nan)
        for at in np.ndindex(values.shape):
            here = fixed | {axis.name: axis.values[index] for axis, index in zip(spread, at, strict=True)}
            number = measured.get(tuple(here[axis.name] for axis in axes))
            values[at] = np.nan if number is None else number
        title = ", ".join(f"{axis.name} {short(fixed[axis.name])}" for axis in others if len(axis.values) > 1)
        found.append(Panel(title, *spread, values))
    return found


def draw(metric: str, drafter: str, maps: Sequence[Panel], path: Path) -> None:
    """Write the maps of one of `METRICS` as one PNG, all on one scale of colours; the best place is framed."""
    numbers = np.concatenate([panel.values.ravel() for panel in maps])
    numbers = numbers[np.isfinite(numbers)]
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 1.0)
    colours, norm, told = scale(metric, low, high)
    num_columns = min(MAX_COLUMNS, len(maps))
    num_rows = -(-len(maps) // num_columns)
    high_cells, wide_cells = maps[0].values.shape
    size = num_columns * (1.3 + 0.62 * wide_cells) + 0.9, num_rows * (1.0 + 0.42 * high_cells) + 0.6
    with matplotlib.rc_context({"font.size": 9.5, "text.parse_math": False, "axes.titlesize": 10}):
        figure = Figure(figsize=(max(5.0, size[0]), max(2.2, size[1])), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes in grid.flat[len(maps) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, maps, strict=False):
            image = axes.imshow(panel.values, cmap=colours, norm=norm, aspect="auto")
            axes.set(title=panel.title, xlabel=panel.columns.name, ylabel=panel.rows.name)
            axes.set_xticks(range(wide_cells), [short(value) for value in panel.columns.values])
            axes.set_yticks(range(high_cells), [short(value) for value in panel.rows.values])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            for row, column in np.argwhere(np.isfinite(panel.values)):
                value = panel.values[row, column]
                red, green, blue, _ = image.cmap(norm(value))
                is_light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                weight = "bold" if value == high else "normal"
                ink = "black" if is_light else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, weight=weight)
                if value == high:
                    corner = (column - 0.47, row - 0.47)
                    axes.add_patch(matplotlib.patches.Rectangle(corner, 0.94, 0.94, fill=False, ec=ink, lw=1.6))
        figure.suptitle(f"{drafter}: {METRICS[metric]}", fontsize=11, fontweight="bold", x=0.01, ha="left")
        figure.colorbar(image, ax=grid, shrink=0.9, pad=0.02, label=told)
        figure.savefig(path, dpi=160)


def scale(metric: str, low: float, high: float) -> tuple[str, Normalize, str]:
    """Colours from the least to the greatest number, and what to say of them.

    A speed-up above 1 is green and one below it purple; all colours lie between the numbers where they are of one side.
    """
    ends = Normalize(low, max(high, low + 1e-3))
    if metric != "speedup":
        return "viridis", ends, ""
    if high < 1:
        return "Purples_r", ends, "none is faster"
    if low > 1:
        return "Greens", ends, "all are faster"
    return "PRGn", CenteredNorm(1, max(1 - low, high - 1, 1e-3)), "white: as fast"


def short(value: str) -> str:
    """A value's name, of a long one the end."""
    return value if len(value) <= MAX_NAME else f"…{value[1 - MAX_NAME :]}"
