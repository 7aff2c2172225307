"""Plots of learned drafters: acceptance by number of nodes and by depth, and the blank share during training."""

from __future__ import annotations

import csv
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.evaluate.plots import FADED, PALETTE

Results = dict[tuple[str, str], list[dict[str, Any]]]  # by arm and tree, a result for each seed
Colours = dict[tuple[str, str], str]


def plot(results: Results, folder: Path) -> list[Path]:
    """Write the plots as PNG files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    colours = dict(zip(results, cycle(PALETTE + FADED), strict=False))
    plots = {"budget": by_budget, "depth": by_depth, "blank_share": blank_share}
    written = []
    for name, draw in plots.items():
        figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(color="#d8dce2", linewidth=0.6)
        draw(axes, results, colours)
        if not axes.get_lines():
            continue
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(folder / f"{name}.png")
        written.append(folder / f"{name}.png")
    return written


def by_budget(axes: Axes, results: Results, colours: Colours) -> None:
    """Plot acceptance length by number of nodes; lines are means over seeds, shaded from smallest to largest."""
    for (name, tree), runs in results.items():
        budgets = [int(budget) for budget in runs[0]["length"]]
        lengths = [[run["length"][str(budget)] for run in runs] for budget in budgets]
        colour = colours[name, tree]
        axes.plot(
            budgets, [mean(each) for each in lengths], marker="o", markersize=3, color=colour, label=label(name, tree)
        )
        axes.fill_between(
            budgets, [min(each) for each in lengths], [max(each) for each in lengths], color=colour, alpha=0.15
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.set_xlabel("draft nodes per step")
    axes.set_ylabel("acceptance length")


def by_depth(axes: Axes, results: Results, colours: Colours) -> None:
    """Plot the share of steps that accept at least d draft tokens, at the largest number of nodes."""
    for (name, tree), runs in results.items():
        deepest = min(len(run["by_depth"]) for run in runs)
        depths = list(range(1, deepest + 1))
        shares = [mean(run["by_depth"][depth - 1] for run in runs) for depth in depths]
        axes.plot(depths, shares, marker="o", markersize=3, color=colours[name, tree], label=label(name, tree))
    axes.set_yscale("log")
    axes.set_xlabel("draft tokens accepted, at least")
    axes.set_ylabel("share of steps")


def blank_share(axes: Axes, results: Results, colours: Colours) -> None:
    """Plot the mean probability of the blank during training, for the first seed of each arm with a blank."""
    plotted = set()
    for (name, tree), runs in results.items():
        steps, shares = logged(Path(runs[0]["folder"]) / "log" / "metrics.csv", "train/blank_share")
        if steps and name not in plotted:
            axes.plot(steps, shares, color=colours[name, tree], label=name, linewidth=1.2)
            plotted.add(name)
    axes.set_xlabel("training step")
    axes.set_ylabel("blank share")
    axes.set_ylim(bottom=0)


def logged(path: Path, column: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a column of Lightning's metrics.csv, both empty if there is no such column."""
    with path.open(encoding="utf-8") as file:
        rows = [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if row.get(column)]
    return [step for step, _ in rows], [value for _, value in rows]


def label(name: str, tree: str) -> str:
    """Return the legend of a line."""
    return f"{name}, {tree}"
