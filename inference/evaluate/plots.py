"""The plots of an evaluation: matplotlib figures of summaries, as PNG images."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from inference.evaluate.intervals import Estimate
from inference.evaluate.metrics import Summary

Summaries = Mapping[str, Summary]  # of one benchmark, by drafter
Colours = Mapping[str, str]  # by drafter
Lines = Mapping[str, Sequence[tuple[float, Estimate]]]  # the points of each drafter

VANILLA_GREY = "#969ba3"
PALETTE = ("#3f7fdb", "#e2803a", "#2ea583", "#c4579f", "#8b6fd8", "#cfa02a", "#45acc9", "#d65a5a", "#7d9a3c", "#a5765a")
FADED = ("#9fbfed", "#f0bf9c", "#96d2c1", "#e1abcf", "#c5b7eb", "#e7cf94", "#a2d5e5", "#eaacac", "#becc9d", "#d2baac")
DASHED = (0, (4, 3))
WIDTH = 5.6
INK = "#7d8590"  # as in the style
STYLE = Path(__file__).with_suffix(".mplstyle")


def choose_colours(summaries: Iterable[Summary]) -> dict[str, str]:
    """Choose one colour for each drafter in all plots, whatever the number of requests; the baseline is grey."""
    every = list(summaries)
    others = dict.fromkeys(summary.drafter for summary in every if not summary.is_baseline)
    colours = {drafter: (PALETTE + FADED)[index % (2 * len(PALETTE))] for index, drafter in enumerate(others)}
    return {summary.name: colours.get(summary.drafter, VANILLA_GREY) for summary in every}


# ---- bars


def plot_bars(
    summaries: Summaries, colours: Colours, title: str, label: str, read: Callable[[Summary], Estimate], unit: str = ""
) -> Figure:
    """A bar for each drafter, with its interval; of several baselines only the first, as all are at the dashed line."""
    first = next((name for name, summary in summaries.items() if summary.is_baseline), None)
    summaries = {name: summary for name, summary in summaries.items() if name == first or not summary.is_baseline}
    estimates = [read(summary) for summary in summaries.values()]
    figure, axes = _figure(1.5 + 0.36 * len(summaries), title)
    values = [estimate.value or 0.0 for estimate in estimates]
    axes.barh(range(len(values)), values, color=[colours[name] for name in summaries], height=0.68)
    ends = [1.0]
    for row, (value, estimate) in enumerate(zip(values, estimates, strict=True)):
        low, high = estimate.interval or (value, value)
        if low < high:
            axes.plot([low, high], [row, row], color=INK, linewidth=1.2, marker="|", markersize=7)
            label += "; whiskers: 95 %" * ("whiskers" not in label)
        ends.append(max(value, high))
        text = "not measured" if estimate.value is None else f"{value:.2f}{unit}"
        axes.annotate(text, (ends[-1], row), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=INK, linewidth=1, linestyle=DASHED)
    axes.set_xlim(0, 1.17 * max(ends))
    axes.set_xlabel(label)
    _as_rows(axes, summaries)
    return figure


# ---- lines


def plot_depths(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter: the share of steps that accept at least d draft tokens."""
    percents = {name: [100 * (rate.rate.value or 0) for rate in s.acceptance.rates] for name, s in summaries.items()}
    points = {name: [(at, Estimate(share)) for at, share in enumerate(own, 1)] for name, own in percents.items() if own}
    title, labels = "Steps that accept at least d draft tokens", ("d, draft tokens", "% of steps")
    figure = _lines(title, points, colours, labels)
    (axes,) = figure.axes
    axes.set_xlim(0.7, max([1, *(sum(share >= 1 for share in own) for own in percents.values())]) + 0.3)
    axes.set_ylim(0, 10 * math.ceil(max([10.0, *(share for own in percents.values() for share in own)]) / 10))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))
    return figure


def plot_concurrency(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter: its tokens per second / the baseline's, by the number of requests at once."""
    served = [s for s in summaries.values() if s.latency and s.concurrency and not s.is_baseline]
    walls: dict[str, list[tuple[float, Estimate]]] = {}
    for summary in sorted(served, key=lambda summary: summary.concurrency or 0):
        walls.setdefault(summary.drafter, []).append((summary.concurrency or 0, summary.speed.wall))
    by_drafter = {summary.drafter: colours[summary.name] for summary in served}
    labels = "requests at once", "tokens/s, × the baseline's"
    figure = _lines("Speed-up by requests at once", walls, by_drafter, labels, is_relative=True)
    _logarithmic(figure.axes[-1], {level: str(level) for level in sorted({s.concurrency or 0 for s in served})})
    return figure


# ---- drawing

PLOTS: dict[str, Callable[[Summaries, Colours], Figure]] = {
    "speedup": partial(
        plot_bars,
        title="Speed-up over the baseline",
        label="dashed: the baseline",
        read=lambda s: s.speed.speedup,
        unit="×",
    ),
    "acceptance": partial(
        plot_bars, title="Acceptance length", label="tokens per base forward", read=lambda s: s.acceptance.length
    ),
    "depths": plot_depths,
    "concurrency": plot_concurrency,
}


def applicable(summaries: Summaries) -> list[str]:
    """The names of the plots that have something to show."""
    every = list(summaries.values())
    is_served, has_drafters = any(s.latency for s in every), not all(s.is_baseline for s in every)
    conditions = {
        "speedup": not is_served,
        "acceptance": any(s.acceptance.length.value for s in every),
        "depths": not is_served or any(s.acceptance.rates for s in every),
        "concurrency": is_served and has_drafters,
    }
    return [plot for plot in PLOTS if conditions[plot]]


def draw(plot: str, summaries: Summaries, colours: Colours) -> bytes:
    """Draw the plot of this name as a PNG image."""
    with matplotlib.rc_context(fname=STYLE):
        png = io.BytesIO()
        PLOTS[plot](summaries, colours).savefig(png, format="png", transparent=True)
        return png.getvalue()


def _figure(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _lines(title: str, lines: Lines, colours: Colours, labels: tuple[str, str], is_relative: bool = False) -> Figure:
    """A line for each drafter and a band for its intervals; ``labels`` are those of the x and y axes."""
    figure, axes = _figure(3.5, title)
    label = labels[0]
    for drafter, points in lines.items():
        known = [(x, each.value, each.interval) for x, each in points if each.value is not None]
        places, values = [x for x, *_ in known], [value for _, value, _ in known]
        axes.plot(places, values, color=colours[drafter], label=drafter, marker="o")
        if any(interval for *_, interval in known):
            bounds = [interval or (value, value) for _, value, interval in known]
            low, high = zip(*bounds, strict=True)
            axes.fill_between(places, low, high, color=colours[drafter], alpha=0.15, linewidth=0)
            label += "; shaded: 95 %" * ("shaded" not in label)
    if is_relative:
        axes.axhline(1, color=INK, linewidth=1, linestyle=DASHED)
        label += "; dashed: the baseline"
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.grid(axis="both")
    axes.set_xlabel(label)
    _legend_below(figure)
    return figure


def _logarithmic(axes: Axes, ticks: Mapping[int, str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()


def _as_rows(axes: Axes, names: Iterable[str]) -> None:
    """Label the rows with names, the first on top, and draw vertical grid lines."""
    labels = [textwrap.fill(textwrap.shorten(name.replace(",", ", "), 44, placeholder=" …"), 24) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _legend_below(figure: Figure) -> None:
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
