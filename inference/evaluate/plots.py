"""The plots of an evaluation: matplotlib figures of summaries, as PNG images."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.evaluate.figures import Summary
from inference.evaluate.intervals import Estimate

Summaries = Mapping[str, Summary]  # of one benchmark, by drafter
Colours = Mapping[str, str]  # by drafter
Points = Sequence[tuple[float, float | None]]

VANILLA_GREY = "#969ba3"
PALETTE = ("#3f7fdb", "#e2803a", "#2ea583", "#c4579f", "#8b6fd8", "#cfa02a", "#45acc9", "#d65a5a", "#7d9a3c", "#a5765a")
FADED = ("#9fbfed", "#f0bf9c", "#96d2c1", "#e1abcf", "#c5b7eb", "#e7cf94", "#a2d5e5", "#eaacac", "#becc9d", "#d2baac")
DASHED = (0, (4, 3))
WIDTH = 5.6
INK = "#7d8590"  # as in the style
STYLE = Path(__file__).with_suffix(".mplstyle")


def choose_colours(summaries: Iterable[Summary]) -> dict[str, str]:
    """Choose one colour for each drafter in all plots, whatever the number of requests; the baseline is grey."""
    listed = list(summaries)
    drafters = list(dict.fromkeys(summary.drafter for summary in listed if not summary.is_baseline))
    colours = {name: (PALETTE + FADED)[place % (2 * len(PALETTE))] for place, name in enumerate(drafters)}
    return {summary.name: colours.get(summary.drafter, VANILLA_GREY) for summary in listed}


def draw_all(summaries: Summaries, colours: Colours) -> dict[str, bytes]:
    """Draw the plots that have something to show, as PNG images by name."""
    listed, figures, images = list(summaries.values()), dict[str, Figure](), dict[str, bytes]()
    with matplotlib.rc_context(fname=STYLE):
        if any(summary.speed.speedup.value for summary in listed):
            title, label = "Speed-up over the baseline", "dashed: the baseline"
            figures["speedup"] = plot_bars(summaries, colours, title, label, lambda s: s.speed.speedup, "×")
        if any(summary.acceptance.length.value for summary in listed):
            title, label = "Acceptance length", "tokens per base forward"
            figures["acceptance"] = plot_bars(summaries, colours, title, label, lambda s: s.acceptance.length)
        if any(summary.acceptance.rates for summary in listed):
            figures["depths"] = plot_depths(summaries, colours)
        if any(summary.concurrency and not summary.is_baseline for summary in listed):
            figures["concurrency"] = plot_concurrency(summaries, colours)
        for name, figure in figures.items():
            png = io.BytesIO()
            figure.savefig(png, format="png", transparent=True)
            images[name] = png.getvalue()
    return images


def plot_bars(
    summaries: Summaries, colours: Colours, title: str, label: str, read: Callable[[Summary], Estimate], unit: str = ""
) -> Figure:
    """A bar for each drafter, with its interval; of several baselines only the first, as all are at the dashed line."""
    first = next((name for name, summary in summaries.items() if summary.is_baseline), None)
    names = [name for name, summary in summaries.items() if name == first or not summary.is_baseline]
    figure, axes = _figure(1.5 + 0.36 * len(names), title)
    ends = [1.0]
    for row, name in enumerate(names):
        estimate = read(summaries[name])
        value = estimate.value or 0.0
        low, high = estimate.interval or (value, value)
        axes.barh(row, value, color=colours[name], height=0.68)
        if low < high:
            axes.plot([low, high], [row, row], color=INK, linewidth=1.2, marker="|", markersize=7)
            label += "; whiskers: 95 %" * ("whiskers" not in label)
        text = "not measured" if estimate.value is None else f"{value:.2f}{unit}"
        axes.annotate(text, (max(value, high), row), (5, 0), textcoords="offset points", va="center")
        ends.append(max(value, high))
    axes.axvline(1, color=INK, linewidth=1, linestyle=DASHED)
    axes.set_xlim(0, 1.17 * max(ends))
    axes.set_xlabel(label)
    labels = [textwrap.fill(textwrap.shorten(name.replace(",", ", "), 44, placeholder=" …"), 24) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


def plot_depths(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter: the share of steps that accept at least d draft tokens."""
    percents = {name: [100 * (rate.rate.value or 0) for rate in s.acceptance.rates] for name, s in summaries.items()}
    points = {name: list(enumerate(shares, 1)) for name, shares in percents.items()}
    labels = "d, draft tokens", "% of steps"
    figure, axes = _lines("Steps that accept at least d draft tokens", points, colours, labels)
    deepest = max([1, *(sum(share >= 1 for share in shares) for shares in percents.values())])
    highest = max([10.0, *(share for shares in percents.values() for share in shares)])
    axes.set_xlim(0.7, deepest + 0.3)
    axes.set_ylim(0, 10 * math.ceil(highest / 10))
    axes.set_xticks(range(1, deepest + 1, 1 + deepest // 12))
    return figure


def plot_concurrency(summaries: Summaries, colours: Colours) -> Figure:
    """A line for each drafter: its tokens per second / the baseline's, by the number of requests at once."""
    points: dict[str, list[tuple[float, float | None]]] = {}
    levels = set()
    for summary in sorted(summaries.values(), key=lambda summary: summary.concurrency or 0):
        if summary.concurrency and not summary.is_baseline:
            points.setdefault(summary.drafter, []).append((summary.concurrency, summary.speed.wall.value))
            levels.add(summary.concurrency)
    by_drafter = {summary.drafter: colours[summary.name] for summary in summaries.values()}
    labels = "requests at once; dashed: the baseline", "tokens/s, × the baseline's"
    figure, axes = _lines("Speed-up by requests at once", points, by_drafter, labels)
    axes.axhline(1, color=INK, linewidth=1, linestyle=DASHED)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(levels), list(map(str, sorted(levels))))
    axes.minorticks_off()
    return figure


def _figure(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _lines(title: str, points: Mapping[str, Points], colours: Colours, labels: tuple[str, str]) -> tuple[Figure, Axes]:
    """A line for each drafter that has points; ``labels`` are those of the x and y axes."""
    figure, axes = _figure(3.5, title)
    for name, listed in points.items():
        values = [(x, y) for x, y in listed if y is not None]
        if values:
            label = name if len(name) <= 40 else f"{name[:39]}…"
            axes.plot(*zip(*values, strict=True), color=colours[name], label=label, marker="o")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.grid(axis="both")
    _, names = axes.get_legend_handles_labels()
    if names:
        columns = min(4, max(1, 70 // (6 + max(map(len, names)))))
        figure.set_size_inches(WIDTH, 3.5 + 0.17 * max(0, -(-len(names) // columns) - 2))  # grows with the legend
        figure.legend(loc="outside lower center", ncols=columns, handlelength=1.1, columnspacing=1.4, fontsize=9)
    return figure, axes
