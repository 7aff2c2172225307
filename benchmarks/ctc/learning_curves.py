"""Acceptance length of learned drafters by the length and by the CPU time of their training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.experiment import BUDGETS, SharedSettings, decoded_answers, minutes_of, train
from benchmarks.harness import ResultTable, main, show
from benchmarks.learned_drafters import ARMS, BEST_TREES, simulate_all
from inference.evaluate.plots import FADED, PALETTE
from inference.verifier.base import load_base

Points = dict[str, dict[int, list[dict[str, Any]]]]  # by arm and number of steps, a result for each seed


def learning_curves(
    base: str,
    files: list[str],
    questions: str,
    out: str,
    arms: list[str],
    steps: list[int] = [150, 600, 2400],  # noqa: B006
    seeds: list[int] = [0],  # noqa: B006
    benchmark: str = "gsm8k",
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 200,
    nodes: int = 64,
    features: str | None = None,
    threads: int = 0,
    table: str | None = None,
    figure: str | None = None,
) -> None:
    """Train each arm for several numbers of steps and simulate decoding on the base's own greedy answers.

    Every point is a training of its own, whose learning rate decays to zero at its last step. Trainings that exist in
    OUT/STEPS are kept: repeat the command to continue an interrupted run, or to add points.

    Args:
        base: Folder or hub id of the base.
        files: Training text, best the base's own text, from `drafters regenerate`.
        questions: JSONL file with the questions whose answers are decoded.
        out: Folder for the trained drafters and their results.
        arms: Names of the arms, as in `benchmarks.learned_drafters`.
        steps: Numbers of training steps.
        seeds: Seeds of the weights, the anchors and the order of the text.
        benchmark: Format of the questions: gsm8k, mt_bench or embedded.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        nodes: Number of draft nodes: 1, 2, 4, 8, 16, 32 or 64.
        features: Feature store of the training text, from `drafters features`.
        threads: Number of torch threads; 0 keeps the default.
        table: Markdown file to write the table to.
        figure: PNG file to write the plot to.
    """
    if unknown := [name for name in arms if name not in ARMS]:
        raise ValueError(f"unknown arms {', '.join(unknown)}: known are {', '.join(ARMS)}")
    if nodes not in BUDGETS:
        raise ValueError(f"{nodes} nodes are not simulated: give one of {', '.join(map(str, BUDGETS))}")
    if threads:
        torch.set_num_threads(threads)
    folder, frozen = Path(out), load_base(base)
    points: Points = {name: {} for name in arms}
    for count in steps:
        common = SharedSettings(base, files, count, features=features)
        trained = {
            (name, seed): train(ARMS[name], seed, common, folder / str(count)) for seed in seeds for name in arms
        }
        answers = decoded_answers(frozen, benchmark, questions, offset, limit, max_new_tokens, folder)
        for (name, _), runs in simulate_all(trained, frozen, answers, BEST_TREES).items():
            points[name][count] = runs
    notes = [
        f"Base {base}; {nodes} nodes; {common.batch_size} conversations a step; seeds {', '.join(map(str, seeds))}. "
        "Acceptance length, and the CPU time of the training in minutes, means over the seeds."
    ]
    show([curve_table(points, steps, nodes, notes)], torch.device("cpu"), table)
    if figure:
        plot(points, nodes, Path(figure))


def curve_table(points: Points, steps: Sequence[int], nodes: int, notes: list[str]) -> ResultTable:
    """Return the acceptance length and the training time of every arm by number of steps."""
    headings = ["drafter", *(f"{count:,} steps" for count in steps), *(f"minutes, {count:,}" for count in steps)]
    table = ResultTable("Acceptance length by training", headings, notes=notes)
    for name, by_steps in points.items():
        lengths = [[run["length"][str(nodes)] for run in by_steps[count]] for count in steps]
        minutes = [minutes_of([run["folder"] for run in by_steps[count]]) for count in steps]
        spreads = [
            f"{mean(each):.3f}" + (f" ({min(each):.3f} to {max(each):.3f})" if len(each) > 1 else "")
            for each in lengths
        ]
        table.rows.append([name, *spreads, *("–" if math.isnan(each) else f"{each:.1f}" for each in minutes)])
    return table


def plot(points: Points, nodes: int, path: Path) -> None:
    """Plot acceptance length by training steps and by CPU time of the training, side by side."""
    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, label in zip(panels, ("training steps", "CPU time of the training, minutes"), strict=True):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(color="#d8dce2", linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xlabel(label)
    panels[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[1].xaxis.set_major_formatter("{x:g}")
    panels[1].minorticks_off()
    panels[0].set_ylabel(f"acceptance length, {nodes} nodes")
    for (name, by_steps), colour in zip(points.items(), cycle(PALETTE + FADED), strict=False):
        counts = sorted(by_steps)
        panels[0].set_xticks(counts, [f"{count:,}" for count in counts])
        panels[0].minorticks_off()
        minutes = [minutes_of([run["folder"] for run in by_steps[count]]) for count in counts]
        for axes, values in zip(panels, ([*map(float, counts)], minutes), strict=True):
            draw_line(
                axes, values, [[run["length"][str(nodes)] for run in by_steps[count]] for count in counts], colour, name
            )
    panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_line(axes: Axes, values: Sequence[float], lengths: Sequence[Sequence[float]], colour: str, name: str) -> None:
    """Draw the means over seeds, shaded from the smallest to the largest."""
    axes.plot(values, [mean(each) for each in lengths], marker="o", markersize=3, color=colour, label=name)
    axes.fill_between(
        values, [min(each) for each in lengths], [max(each) for each in lengths], color=colour, alpha=0.15
    )


if __name__ == "__main__":
    main(learning_curves)
