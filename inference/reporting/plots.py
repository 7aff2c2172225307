"""Plots of the report: matplotlib figures of summaries, as PNG images for a light and a dark page."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from inference.reporting.headline import speed_fields
from inference.reporting.length_plot import plot_lengths
from inference.reporting.lengths import length_ranges
from inference.reporting.plot_legend import legend_below
from inference.results.metrics import Summary

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
BUDGET_ARGUMENTS = ("num_nodes", "num_draft")
THEMES = {
    "light": ("#ffffff", "#24292f", "#d8dce2"),
    "dark": ("#181b20", "#d7dbe0", "#3a3f47"),
}  # background, text, grid


def choose_colours(summaries: Iterable[Summary]) -> Colours:
    """Choose one colour for each drafter in all plots, whatever the number of requests; the baseline is grey."""
    every = list(summaries)
    families = {summary.drafter: summary.served.drafter if summary.served else summary.drafter for summary in every}
    others = dict.fromkeys(families[summary.drafter] for summary in every if not summary.is_baseline)
    colours = {family: (PALETTE + FADED)[index % (2 * len(PALETTE))] for index, family in enumerate(others)}
    return {drafter: colours.get(family, VANILLA_GREY) for drafter, family in families.items()}


def plot_speedup(summaries: Summaries, colours: Colours) -> Figure:
    """A bar for the speed-up of each drafter, with its interval."""
    speedup, interval = speed_fields(summaries.values())
    title = "Speed-up over the baseline" + (", wall time" if speedup == "wall_speedup" else "")
    figure = _bars(summaries, colours, title, speedup, interval, "×")
    figure.axes[0].set_xlabel("dashed: the baseline" + _interval_legend(summaries, interval))
    return figure


def plot_acceptance(summaries: Summaries, colours: Colours) -> Figure:
    """A bar for the acceptance length of each drafter, with its interval."""
    figure = _bars(summaries, colours, "Acceptance length", "acceptance_length", "acceptance_interval")
    figure.axes[0].set_xlabel("tokens per base forward" + _interval_legend(summaries, "acceptance_interval"))
    return figure


def plot_categories(summaries: Summaries, colours: Colours) -> Figure:
    """A group of bars for each category: the acceptance length of each drafter."""
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
    axes.set_xlabel("tokens per base forward; dashed: without a drafter")
    _as_rows(axes, categories)
    legend_below(figure)
    return figure


def plot_depths(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter: the share of steps that accept at least d draft tokens."""
    figure, axes = _figure(3.5, "Steps that accept at least d draft tokens")
    deepest, highest = 1, 10.0
    for drafter, summary in summaries.items():
        if shares := summary.acceptance_by_depth:
            percents = [100 * share for share in shares]
            axes.plot(range(1, len(shares) + 1), percents, color=colours[drafter], label=drafter, marker="o")
            deepest = max(deepest, sum(percent >= 1 for percent in percents))
            highest = max(highest, *percents)
    axes.set_xlabel("d, draft tokens")
    axes.set_ylabel("% of steps")
    axes.set_xlim(0.7, deepest + 0.3)
    axes.set_ylim(0, 10 * math.ceil(highest / 10))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="both")
    legend_below(figure)
    return figure


def plot_phases(summaries: Summaries, colours: Colours) -> Figure:
    """A stacked bar for each drafter: the time per token of each phase of decoding."""
    figure, axes = _figure(1.9 + 0.36 * len(summaries), "Time by phase")
    ends = dict.fromkeys(summaries, 0.0)
    for phase, colour in PHASE_COLOURS.items():
        costs = [1000 * max(s.phase_seconds.get(phase, 0.0), 0.0) / max(s.tokens, 1) for s in summaries.values()]
        axes.barh(range(len(costs)), costs, left=list(ends.values()), color=colour, label=phase, height=0.68)
        ends = {drafter: end + cost for (drafter, end), cost in zip(ends.items(), costs, strict=True)}
    for row, end in enumerate(ends.values()):
        axes.annotate(f"{end:.1f}", (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.12 * max(ends.values()) or 1)
    axes.set_xlabel("ms per token")
    _as_rows(axes, summaries)
    legend_below(figure)
    return figure


def plot_budget(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter with several budgets: acceptance length and speed-up by the tokens fed per step."""
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title("Effect of a larger draft tree")
    for family, drafters in budgets(summaries).items():
        points = sorted((summaries[drafter] for drafter in drafters), key=lambda s: s.fed_per_step or 0.0)
        colour, fed = colours[drafters[0]], [s.fed_per_step for s in points]
        for axes, measure, interval in (
            (upper, "acceptance_length", "acceptance_interval"),
            (lower, *speed_fields(summaries.values())),
        ):
            values = [getattr(s, measure) or 0.0 for s in points]
            bounds = [getattr(s, interval) or (value, value) for s, value in zip(points, values, strict=True)]
            axes.plot(fed, values, color=colour, label=family, marker="o")
            axes.fill_between(fed, *zip(*bounds, strict=True), color=colour, alpha=0.15, linewidth=0)
    lower.axhline(1, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))
    upper.set_ylabel("acceptance length")
    lower.set_ylabel("speed-up")
    lower.set_xlabel("fed tokens per step; dashed: the baseline")
    for axes in (upper, lower):
        axes.grid(axis="both")
    legend_below(figure)
    return figure


def plot_concurrency(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter: its tokens per second / the baseline's, by the number of requests at once.

    Where the CPU time of the server is known, a second panel compares tokens per CPU second.
    """
    lines: dict[str, list[Summary]] = {}
    for summary in summaries.values():
        if summary.served and not summary.is_baseline:
            lines.setdefault(summary.served.drafter, []).append(summary)
    has_cpu = any(s.served.cpu_speedup for own in lines.values() for s in own if s.served)
    figure = Figure(figsize=(5.6, 4.6 if has_cpu else 3.2), layout="constrained")
    panels = list(figure.subplots(1 + has_cpu, 1, sharex=True, squeeze=False)[:, 0])
    panels[0].set_title("Speed-up by requests at once")
    levels = sorted({s.served.concurrency for s in summaries.values() if s.served})
    for drafter, own in lines.items():
        own = sorted(own, key=lambda s: s.served.concurrency if s.served else 0)
        places, colour = [s.served.concurrency for s in own if s.served], colours[own[0].drafter]
        measured = [[s.wall_speedup for s in own], [s.served.cpu_speedup for s in own if s.served]]
        for axes, values in zip(panels, measured, strict=False):
            axes.plot(places, [math.nan if v is None else v for v in values], color=colour, label=drafter, marker="o")
    for axes, label in zip(panels, ("tokens/s", "tokens per CPU second"), strict=False):
        axes.axhline(1, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylabel(f"{label},\n× the baseline's")
        axes.set_ylim(bottom=0)
        axes.grid(axis="both")
    panels[-1].set_xscale("log", base=2)
    panels[-1].set_xticks(levels, list(map(str, levels)))
    panels[-1].minorticks_off()
    panels[-1].set_xlabel("requests at once; dashed: the baseline")
    legend_below(figure)
    return figure


def budgets(summaries: Summaries) -> dict[str, list[str]]:
    """Drafters whose specs differ only in `BUDGET_ARGUMENTS`, by their common spec; at least two of each."""
    families: dict[str, list[str]] = {}
    for drafter, summary in summaries.items():
        if summary.fed_per_step is not None and not summary.is_baseline:
            spec = re.sub(r" \(.*\)$", "", drafter)  # without the folder that a merged drafter comes from
            name, _, arguments = spec.partition(":")
            others = [pair for pair in arguments.split(",") if pair and pair.partition("=")[0] not in BUDGET_ARGUMENTS]
            families.setdefault(":".join([name, *([",".join(others)] if others else [])]), []).append(drafter)
    fed = {family: {summaries[drafter].fed_per_step for drafter in own} for family, own in families.items()}
    return {family: own for family, own in families.items() if len(fed[family]) > 1}


PLOTS: dict[str, Callable[[Summaries, Colours], Figure]] = {
    "speedup": plot_speedup,
    "acceptance": plot_acceptance,
    "depths": plot_depths,
    "phases": plot_phases,
    "categories": plot_categories,
    "budget": plot_budget,
    "positions": partial(plot_lengths, kind="by_position", of="position in the context"),
    "prompts": partial(plot_lengths, kind="by_prompt", of="length of the prompt"),
    "concurrency": plot_concurrency,
}


def applicable(summaries: Summaries) -> list[str]:
    """The names of the plots that have something to show."""
    is_served = any(s.served for s in summaries.values())
    conditions = {
        "speedup": not is_served,
        "phases": not is_served,
        "depths": not is_served or any(s.acceptance_by_depth for s in summaries.values()),
        "acceptance": not is_served or any(s.acceptance_length for s in summaries.values()),
        "concurrency": is_served and not all(s.is_baseline for s in summaries.values()),
        "categories": max(len(s.by_category) for s in summaries.values()) > 1,
        "budget": bool(budgets(summaries)),
        "positions": any(len(length_ranges(summary, "by_position")) > 1 for summary in summaries.values()),
        "prompts": any(len(length_ranges(summary, "by_prompt")) > 1 for summary in summaries.values()),
    }
    return [plot for plot in PLOTS if conditions.get(plot, True)]


def draw(plot: str, summaries: Summaries, colours: Colours) -> dict[str, bytes]:
    """Draw the plot of this name as PNG images, one for a page of each theme.

    The figure is made and laid out once: that takes most of the time.
    """
    present = next(iter(THEMES))
    with matplotlib.rc_context(_style(present)):
        figure = PLOTS[plot](summaries, colours)
        if layout := figure.get_layout_engine():
            layout.execute(figure)
        figure.set_layout_engine("none")
        pngs = {}
        for theme in THEMES:
            _recolour(figure, dict(zip(THEMES[present], THEMES[theme], strict=True)))
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=figure.dpi, facecolor=THEMES[theme][0])
            pngs[theme] = png.getvalue()
            present = theme
    return pngs


def _style(theme: str) -> Any:
    """The settings of matplotlib for a theme."""
    background, ink, grid = THEMES[theme]
    return {
        "figure.dpi": 160,
        "figure.facecolor": background,
        "axes.facecolor": background,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), ink),
        "axes.edgecolor": grid,
        "grid.color": grid,
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
        "text.parse_math": False,  # a name may contain a dollar sign
    }


def _recolour(figure: Figure, new: dict[str, str]) -> None:
    """Give everything in a figure that has one of these colours the new one."""
    known = {to_rgba(old): colour for old, colour in new.items()}
    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            colour: Any = getattr(artist, f"get_{name}", lambda: None)()
            if is_color_like(colour) and to_rgba(colour) in known:
                getattr(artist, f"set_{name}")(known[to_rgba(colour)])


def _bars(summaries: Summaries, colours: Colours, title: str, measure: str, interval: str, unit: str = "") -> Figure:
    """A bar for each drafter; of several baselines only the first, as all of them are at the dashed line."""
    first = next((drafter for drafter, summary in summaries.items() if summary.is_baseline), None)
    shown = {drafter: s for drafter, s in summaries.items() if not s.is_baseline or drafter == first}
    measured = [getattr(summary, measure) for summary in shown.values()]
    values = [value or 0.0 for value in measured]
    bounds = [getattr(s, interval) or (value, value) for s, value in zip(shown.values(), values, strict=True)]
    figure, axes = _figure(1.5 + 0.36 * len(shown), title)
    axes.barh(range(len(values)), values, color=[colours[drafter] for drafter in shown], height=0.68)
    ink, ends = matplotlib.rcParams["text.color"], []
    for row, (value, (low, high)) in enumerate(zip(values, bounds, strict=True)):
        if low < high:
            axes.plot([low, high], [row, row], color=ink, linewidth=1.2, marker="|", markersize=7)
        ends.append(max(value, high))
        text = "not measured" if measured[row] is None else f"{value:.2f}{unit}"
        axes.annotate(text, (ends[-1], row), (5, 0), textcoords="offset points", va="center")
    _mark_one(axes)
    axes.set_xlim(0, 1.17 * max(1.0, *ends))
    _as_rows(axes, shown)
    return figure


def _interval_legend(summaries: Summaries, interval: str) -> str:
    known = (bounds for s in summaries.values() if (bounds := getattr(s, interval)))
    return "; whiskers: 95 %" if any(low < high for low, high in known) else ""


def _acceptance_length(summary: Summary, category: str) -> float:
    measured = summary.by_category.get(category)
    return (measured.acceptance_length if measured else None) or 0.0


def _figure(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _as_rows(axes: Axes, names: Iterable[str]) -> None:
    """Label the rows with names, the first on top, and draw vertical grid lines."""
    labels = [textwrap.fill(textwrap.shorten(name.replace(",", ", "), 44, placeholder=" …"), 24) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _mark_one(axes: Axes) -> None:
    """Draw a dashed line at decoding without a drafter."""
    axes.axvline(1, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))
