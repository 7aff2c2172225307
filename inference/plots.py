"""The report's plots: matplotlib figures of summaries, as PNG, for a light and a dark page."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.metrics import Summary

Summaries = dict[str, Summary]  # of one benchmark, by drafter
Colours = dict[str, str]  # by drafter

VANILLA_GREY = "#969ba3"
PALETTE = ("#3f7fdb", "#e2803a", "#2ea583", "#c4579f", "#8b6fd8", "#cfa02a", "#45acc9", "#d65a5a", "#7d9a3c", "#a5765a")
FADED = ("#9fbfed", "#f0bf9c", "#96d2c1", "#e1abcf", "#c5b7eb", "#e7cf94", "#a2d5e5", "#eaacac", "#becc9d", "#d2baac")
PHASE_COLOURS = {
    "prefill": "#b4bac3",
    "propose": "#e3a13f",
    "forward": "#7590b0",
    "accept": "#46a88a",
    "commit": "#9478d2",
    "observe": "#d4719f",
    "other": "#868c95",
}
THEMES = {"light": ("#ffffff", "#24292f", "#d8dce2"), "dark": ("#181b20", "#d7dbe0", "#3a3f47")}  # paper, ink, rules


def choose_colours(summaries: Iterable[Summary]) -> Colours:
    """One colour for each drafter, whatever the plot; the baseline is grey."""
    is_baseline = {summary.drafter: summary.is_baseline for summary in summaries}
    others = [drafter for drafter, is_it in is_baseline.items() if not is_it]
    colours = {drafter: (PALETTE + FADED)[index % (2 * len(PALETTE))] for index, drafter in enumerate(others)}
    return {drafter: colours.get(drafter, VANILLA_GREY) for drafter in is_baseline}


def plot_speedup(summaries: Summaries, colours: Colours) -> Figure:
    """Speed-up of each drafter, a bar each."""
    values = [summary.speedup or 0.0 for summary in summaries.values()]
    figure, axes = _figure(1.3 + 0.36 * len(summaries), "Speed-up, times the baseline")
    bars = axes.barh(range(len(values)), values, color=[colours[drafter] for drafter in summaries], height=0.68)
    axes.bar_label(bars, [f"{value:.2f}×" for value in values], padding=4)
    _mark_one(axes)
    axes.set_xlim(0, 1.15 * max(1.0, *values))
    _as_rows(axes, summaries)
    return figure


def plot_categories(summaries: Summaries, colours: Colours) -> Figure:
    """Acceptance length by category, a group of bars for each category."""
    drafters = {name: summary for name, summary in summaries.items() if not summary.is_baseline} or summaries
    categories = list(dict.fromkeys(category for summary in drafters.values() for category in summary.by_category))
    height = 0.8 / len(drafters)
    figure, axes = _figure(
        1.5 + len(categories) * max(0.3, 0.14 * len(drafters) + 0.12), "Acceptance length by category"
    )
    for index, (drafter, summary) in enumerate(drafters.items()):
        lengths = [_acceptance_length(summary, category) for category in categories]
        places = [row + (index + 0.5) * height - 0.4 for row in range(len(categories))]
        bars = axes.barh(places, lengths, height=0.9 * height, color=colours[drafter], label=drafter)
        axes.bar_label(bars, [f"{length:.1f}" if length else "" for length in lengths], padding=2, fontsize=7)
    _mark_one(axes)
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("tokens per base forward (dashed: without a drafter)")
    _as_rows(axes, categories)
    _legend_below(figure)
    return figure


def plot_depths(summaries: Summaries, colours: Colours) -> Figure:
    """Share of steps that accept at least d draft tokens, a line for each drafter."""
    figure, axes = _figure(3.5, "Steps that accept at least d draft tokens")
    deepest = 1
    for drafter, summary in summaries.items():
        if shares := summary.acceptance_by_depth:
            percents = [100 * share for share in shares]
            axes.plot(range(1, len(shares) + 1), percents, color=colours[drafter], label=drafter, marker="o")
            deepest = max(deepest, sum(percent >= 1 for percent in percents))
    axes.set_xlabel("d, draft tokens")
    axes.set_ylabel("% of steps")
    axes.set_xlim(0.7, deepest + 0.3)
    axes.set_ylim(0, 100)
    axes.xaxis.get_major_locator().set_params(integer=True, steps=[1, 2, 5, 10])
    axes.grid(axis="both")
    _legend_below(figure)
    return figure


def plot_phases(summaries: Summaries, colours: Colours) -> Figure:
    """Where the time of a token goes, a stacked bar for each drafter."""
    figure, axes = _figure(1.9 + 0.36 * len(summaries), "Time by phase")
    ends = dict.fromkeys(summaries, 0.0)
    for phase, colour in PHASE_COLOURS.items():
        costs = [1000 * max(s.phase_seconds[phase], 0.0) / max(s.tokens, 1) for s in summaries.values()]
        axes.barh(range(len(costs)), costs, left=list(ends.values()), color=colour, label=phase, height=0.68)
        ends = {drafter: end + cost for (drafter, end), cost in zip(ends.items(), costs, strict=True)}
    for row, end in enumerate(ends.values()):
        axes.annotate(f"{end:.1f}", (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.12 * max(ends.values()) or 1)
    axes.set_xlabel("ms per token")
    _as_rows(axes, summaries)
    _legend_below(figure)
    return figure


PLOTS: dict[str, Callable[[Summaries, Colours], Figure]] = {
    "speedup": plot_speedup,
    "phases": plot_phases,
    "depths": plot_depths,
    "categories": plot_categories,
}


def draw(plot: str, summaries: Summaries, colours: Colours, theme: str = "light") -> bytes:
    """The plot of this name as a PNG, for a page of this theme."""
    paper, ink, rules = THEMES[theme]
    style = {
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.facecolor": paper,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), ink),
        "axes.edgecolor": rules,
        "grid.color": rules,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlepad": 10,
        "font.size": 9.5,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
        "legend.frameon": False,
        "text.parse_math": False,  # a name may hold a dollar sign
    }
    with matplotlib.rc_context(style):
        figure = PLOTS[plot](summaries, colours)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=160)
    return png.getvalue()


def _acceptance_length(summary: Summary, category: str) -> float:
    measured = summary.by_category.get(category)
    return (measured.acceptance_length if measured else None) or 0.0


def _figure(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _as_rows(axes: Axes, names: Iterable[str]) -> None:
    """One row for each name, the first on top, ruled by values."""
    labels = [textwrap.fill(textwrap.shorten(name.replace(",", ", "), 44, placeholder=" …"), 24) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _mark_one(axes: Axes) -> None:
    """A dashed line where decoding without a drafter stands."""
    axes.axvline(1, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))


def _legend_below(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        labels = [label if len(label) <= 40 else f"{label[:39]}…" for label in labels]
        ncols = min(4, max(1, 70 // (6 + max(map(len, labels)))))
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.17 * max(0, -(-len(labels) // ncols) - 2))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=ncols, handlelength=1.1, columnspacing=1.4, fontsize=9
        )
