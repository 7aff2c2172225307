"""Draws docs/ctc.png, the worked example of docs/ctc.md: `python docs/ctc_picture.py`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from drafters.ctc.reference import collapse
from drafters.trees.search import Candidates, SearchLimits, search

WORDS, BLANK = ["very", "good"], 2
FRAMES = np.array([[0.4, 0.1, 0.5], [0.2, 0.5, 0.3], [0.1, 0.5, 0.4]])
TEXT = [0, 1]  # very good
NUM_NODES = 4

NAMES = [*WORDS, "ε"]
COLOURS = ["#3f7fdb", "#e2803a", "#969ba3"]
INK, FAINT = "#24292f", "#8a929c"


def box(axes: Axes, x: float, y: float, text: str, colour: str, alpha: float = 1.0, width: float = 0.86) -> None:
    """A rounded box around (x, y), darker where ``alpha`` is near 1."""
    corner, height = (x - width / 2 + 0.05, y - 0.27), 0.54
    style = "round,pad=0.05,rounding_size=0.09"
    axes.add_patch(FancyBboxPatch(corner, width - 0.1, height, boxstyle=style, facecolor=colour, alpha=alpha, lw=0))
    axes.text(x, y, text, ha="center", va="center", color="white" if alpha > 0.75 else INK, fontsize=11)


def panel(axes: Axes, title: str, caption: str, width: float, height: float) -> None:
    axes.set(xlim=(0, width), ylim=(height, -0.6), aspect="equal")
    axes.axis("off")
    axes.text(0, -0.5, title, fontsize=13, color=INK, va="top", fontweight="bold")
    axes.text(0, height, caption, fontsize=11, color=FAINT, va="bottom")


def draw_frames(axes: Axes) -> None:
    """Each frame a column, each symbol a row, the more probable the darker."""
    panel(axes, "1  Frames", "one pass predicts all three", 4.4, 6.4)
    for t, distribution in enumerate(FRAMES):
        axes.text(1.6 + t, 0.8, f"frame {t + 1}", ha="center", va="center", color=FAINT, fontsize=10)
        for symbol, probability in enumerate(distribution):
            box(axes, 1.6 + t, 1.7 + symbol, f"{probability:g}", COLOURS[symbol], 0.12 + 1.4 * probability)
    for symbol, name in enumerate(NAMES):
        axes.text(0.95, 1.7 + symbol, name, ha="right", va="center", color=INK, fontsize=12)


def draw_alignments(axes: Axes) -> None:
    """The alignments whose text begins with the example's, each with its product."""
    panel(axes, "2  Alignments", "all whose text begins with “very good”", 6.6, 6.4)
    rows = []
    for symbols in product(range(3), repeat=len(FRAMES)):
        text = collapse(torch.tensor(symbols), BLANK)
        if text[: len(TEXT)] == TEXT:
            rows.append((text != TEXT, symbols, FRAMES[range(len(FRAMES)), symbols].prod()))
    rows.sort(key=lambda row: (row[0], -row[2]))
    sums = [sum(p for goes_on, _, p in rows if goes_on == part) for part in (False, True)]
    for number, (goes_on, symbols, probability) in enumerate(rows):
        y = 0.7 + 0.78 * number + 0.35 * goes_on
        for t, symbol in enumerate(symbols):
            box(axes, 0.5 + 0.95 * t, y, NAMES[symbol], COLOURS[symbol])
        axes.text(3.95, y, f"{probability:.2f}", ha="right", va="center", color=INK, fontsize=12)
    num_exact = sum(not goes_on for goes_on, _, _ in rows)
    axes.plot(
        [4.15, 4.3, 4.3, 4.15], [0.5, 0.5, 0.9 + 0.78 * (num_exact - 1), 0.9 + 0.78 * (num_exact - 1)], color=FAINT
    )
    axes.text(
        4.45, 0.7 + 0.39 * (num_exact - 1), f"text is\n“very good”:\n{sums[0]:.2f}", va="center", color=INK, fontsize=12
    )
    last = 0.7 + 0.78 * (len(rows) - 1) + 0.35
    axes.text(4.45, last + 0.05, f"text begins\nwith it: {sum(sums):.2f}", va="center", color=INK, fontsize=12)


def draw_tree(axes: Axes) -> None:
    """The most probable prefixes, a node each."""
    panel(axes, "3  Draft tree", "the four most probable prefixes, node by node", 5.6, 6.4)
    candidates = Candidates(np.arange(2)[None], FRAMES[None, :, :2], FRAMES[None, :, 2])
    (tree,) = search(candidates, SearchLimits(NUM_NODES, len(FRAMES)))
    reached = tree.probabilities
    root, places = (0.5, 3.2), []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        x = 0.5 + 2.2 * tree.depths[node]
        above = root if parent < 0 else places[parent]
        y = {0: 1.7, 1: 4.7}[token] if parent < 0 else above[1]
        places.append((x, y))
        axes.plot([above[0] + 0.5, x - 0.5], [above[1], y], color=FAINT, zorder=0, lw=1 + 4 * reached[node])
        box(axes, x, y, WORDS[token], COLOURS[token], width=1.0)
        axes.text(x, y + 0.62, f"{reached[node]:g}", ha="center", va="center", color=INK, fontsize=12)
        axes.text(x, y - 0.55, f"node {node + 1}", ha="center", va="center", color=FAINT, fontsize=10)
    box(axes, *root, "looks", INK, width=1.0)
    axes.text(root[0], root[1] - 0.55, "root", ha="center", va="center", color=FAINT, fontsize=10)


def draw(path: Path) -> None:
    figure = Figure(figsize=(13, 4.9), facecolor="white", layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[4.4, 6.6, 5.6])
    for part, axes in zip((draw_frames, draw_alignments, draw_tree), panels, strict=True):
        part(axes)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).with_name("ctc.png"))
