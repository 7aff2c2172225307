"""The plot of acceptance length and step time by position in the context, or by length of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from inference.reporting.lengths import length_ranges
from inference.reporting.plot_legend import legend_below
from inference.results.length_figures import SHORTEST
from inference.results.metrics import Summary


def plot_lengths(summaries: Mapping[str, Summary], colours: Mapping[str, str], kind: str, of: str) -> Figure:
    """A line for each drafter: acceptance length and median time of a step by ``kind`` of `length_ranges`."""
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title(f"Acceptance length and step time by {of}")
    ticks: dict[int, str] = {}
    has_intervals = False
    for drafter, summary in summaries.items():
        points = [(own, own.acceptance_length, seconds) for own, seconds in length_ranges(summary, kind)]
        known = [
            (own, length, seconds) for own, length, seconds in points if length is not None and seconds is not None
        ]
        starts = [max(own.start, SHORTEST // 2) for own, _, _ in known]
        upper.plot(starts, [length for _, length, _ in known], color=colours[drafter], label=drafter, marker="o")
        bounds = [own.acceptance_interval or (length, length) for own, length, _ in known]
        has_intervals |= any(low < high for low, high in bounds)
        if bounds:
            upper.fill_between(starts, *zip(*bounds, strict=True), color=colours[drafter], alpha=0.15, linewidth=0)
        lower.plot(starts, [1000 * seconds for _, _, seconds in known], color=colours[drafter], marker="o")
        ticks |= {at: f"{own.start:,}–\n{own.end - 1:,}" for at, (own, _, _) in zip(starts, known, strict=True)}
    lower.set_xscale("log", base=2)
    lower.set_xticks(list(ticks), ticks.values())
    lower.minorticks_off()
    lower.set_xlabel(f"{of}, tokens{'; shaded: 95 %' * has_intervals}")
    lower.set_ylabel("ms, median")
    upper.set_ylabel("acceptance length")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(axis="both")
    legend_below(figure)
    return figure
