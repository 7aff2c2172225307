"""Draws docs/bitwise.png, the two causes in docs/bitwise.md: `python docs/bitwise_picture.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.nn import functional as F

INK, FAINT, BLUE, ORANGE, GREY = "#24292f", "#8a929c", "#3f7fdb", "#e2803a", "#d9dde2"
NUM_ROWS = range(1, 21)
SIZE = 576  # of SmolLM2-135M's states
# One row's keys: committed ones by position, then those of the tree, of which the row sees two.
ALIGNED, TAIL, NODES, SEEN = 8, 3, 6, (1, 4)


def share_that_differs(num_rows: int) -> float:
    """Share of the values of a product of some rows that a product of 64 rows rounds otherwise, in float32."""
    torch.manual_seed(0)
    weight, rows = torch.randn(SIZE, SIZE), torch.randn(64, SIZE)
    return (F.linear(rows[:num_rows], weight) != F.linear(rows, weight)[:num_rows]).float().mean().item()


def draw_rows(axes: Axes) -> None:
    shares = [100 * share_that_differs(num_rows) for num_rows in NUM_ROWS]
    axes.bar(NUM_ROWS, shares, color=[ORANGE if share else BLUE for share in shares])
    equal = [num_rows for num_rows, share in zip(NUM_ROWS, shares, strict=True) if not share]
    axes.plot(equal, [0] * len(equal), "o", color=BLUE, markersize=5, clip_on=False)
    axes.set_title("1  The number of rows", loc="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_xlabel("rows in the product", color=INK)
    axes.set_ylabel("values that a product of 64 rows\nrounds otherwise (%)", color=INK)
    axes.set_xticks([1, 4, 8, 12, 16, 20])
    axes.spines[["top", "right"]].set_visible(False)


def draw_keys(axes: Axes) -> None:
    axes.set(xlim=(-0.2, ALIGNED + TAIL + NODES + 0.4), ylim=(5.4, -0.9), aspect="equal")
    axes.axis("off")
    axes.set_title("2  The order of the keys", loc="left", fontsize=13, fontweight="bold", color=INK)

    def squares(y: float, colours: list[str], label: str) -> None:
        axes.text(0, y - 0.25, label, fontsize=10.5, color=INK)
        for x, colour in enumerate(colours):
            axes.add_patch(Rectangle((x, y), 0.86, 0.86, facecolor=colour, linewidth=0))

    committed = [BLUE] * ALIGNED + [ORANGE] * TAIL
    squares(0.4, committed + [ORANGE] * len(SEEN), "a row of a single path reads its keys in one block")
    nodes = [ORANGE if node in SEEN else GREY for node in range(NODES)]
    squares(2.4, committed + nodes, "in a tree, other nodes (grey) stand between them")
    border = ALIGNED - 0.07
    for y in (0.3, 2.3):
        axes.plot([border, border], [y, y + 1.06], color=INK, linewidth=1.6)
    axes.text(0, 4.1, "aligned: up to a place that\nthe row's position decides", color=BLUE, va="top", fontsize=10)
    axes.text(border + 0.2, 4.1, "tail: added key by key;\na masked key adds 0", color=ORANGE, va="top", fontsize=10)


def main() -> None:
    torch.set_num_threads(2)
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    draw_rows(left)
    draw_keys(right)
    figure.savefig(Path(__file__).with_name("bitwise.png"), dpi=110)


if __name__ == "__main__":
    main()
