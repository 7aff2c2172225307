"""Tables of an evaluation, for the terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from data.files import escape_markdown
from inference.reporting.headline import Summaries as Summaries
from inference.reporting.headline import headline, name_of
from inference.reporting.lengths import LENGTH_LEGEND, length_tables
from inference.reporting.rows import Row, markdown_table, number, rich_table
from inference.results.metrics import CategorySummary, Summary
from inference.timing import MIN_CORE_SHARE

COUNTING_RULE = (
    "Acceptance length = emitted tokens / base forwards, prefill excluded, over all questions (micro average)."
)
OVERVIEW, BY_CATEGORY = (f"Acceptance length and speed-up by {what}" for what in ("benchmark", "category"))
COLUMNS = (
    ("drafter", lambda s: s.drafter),
    ("acceptance length", lambda s: number(s.acceptance_length)),
    ("mean per question", lambda s: number(s.acceptance_length_mean)),
    ("ended by EOS", lambda s: number(s.acceptance_length_ended)),
    ("in reasoning", lambda s: number(s.reasoning and s.reasoning.reasoning.acceptance_length)),
    ("in the answer", lambda s: number(s.reasoning and s.reasoning.answer.acceptance_length)),
    ("with prefill", lambda s: number(s.acceptance_length_with_prefill)),
    ("speed-up", lambda s: number(s.speedup, unit="×")),
    ("timing error", lambda s: _percent(None if s.is_baseline else s.timing_error)),
    ("wall speed-up", lambda s: number(s.wall_speedup, unit="×")),
    ("noise", lambda s: _percent(s.noise if s.timing_error is None else None)),
    ("tokens/s", lambda s: number(s.tokens_per_second, places=1)),
    ("tokens/CPU s", lambda s: number(s.served and s.served.tokens_per_cpu_second, places=1)),
    ("CPU speed-up", lambda s: number(s.served and s.served.cpu_speedup, unit="×")),
    ("first token, ms", lambda s: _milliseconds(s.served and s.served.first_token)),
    ("inter-token, ms", lambda s: _milliseconds(s.served and s.served.inter_token)),
    ("fed tokens/step", lambda s: number(s.fed_per_step, places=1)),
    ("of them scratch", lambda s: number(s.scratch_per_step, places=1)),
    ("draft forwards/step", lambda s: number(s.draft_forwards_per_step, places=1)),
    ("CPU ms/token", lambda s: number(_cpu_milliseconds(s))),
    ("peak MiB", lambda s: number(None if s.peak_bytes is None else s.peak_bytes / 2**20, places=0)),
    ("identical answers", lambda s: _identical(s)),
)
INTERVALS = {
    "acceptance length": "acceptance_interval",
    "mean per question": "acceptance_mean_interval",
    "speed-up": "speedup_interval",
    "wall speed-up": "wall_speedup_interval",
}
RANKED = {
    "acceptance length": "acceptance_length",
    "mean per question": "acceptance_length_mean",
    "ended by EOS": "acceptance_length_ended",
    "with prefill": "acceptance_length_with_prefill",
    "speed-up": "speedup",
    "wall speed-up": "wall_speedup",
    "tokens/s": "tokens_per_second",
}
MEANINGS = {
    "speed-up": "Speed-up: by typical step times, which other work on the machine hardly changes.",
    "in reasoning": "In reasoning, in the answer: acceptance length inside and outside of the template's marks.",
    "timing error": "Timing error: half of the 95 % interval that timing leaves the speed-up on these questions.",
    "wall speed-up": "Wall speed-up: by the clock.",
    "tokens/CPU s": "Tokens/CPU s: by the CPU time of all processes of the server.",
    "first token, ms": "First token: from a request to the first token of its answer, median / 95th percentile.",
    "inter-token, ms": "Inter-token: between two tokens; those that arrive together divide the time before equally.",
    "noise": "Noise: standard deviation of the wall speed-up between runs, where the timing error is unknown.",
    "CPU ms/token": "CPU: of all threads; small, wall time / CPU time of the decoding thread if it waited for a core.",
}
TERMINAL_COLUMNS = (
    *("drafter", "acceptance length", "speed-up", "wall speed-up", "tokens/s", "fed tokens/step"),
    *("tokens/CPU s", "inter-token, ms", "identical answers"),
)
DRAFT_TOKENS = "Draft tokens, and the share of steps that accept the draft token at position 1, 2, ..."
DRAFT_LEGEND = (
    "Second row: the share of the steps that accepted the position before. In small type: 95 % intervals, where known. "
    "Efficiency: accepted / drafted tokens. Wasted: fed in vain for each emitted token. Fed: for each emitted token, 1 "
    "without a drafter."
)
CONDITIONAL = "given the one before"  # name of the rows of conditional rates
MAX_POSITIONS = 8  # of the table of draft tokens
MAX_TERMINAL_DRAFTERS = 6  # side by side in one table


def table(summaries: Summaries) -> list[RenderableType]:
    """The tables of all benchmarks with titles and footnotes, for a rich console to print one after the other."""
    parts: list[RenderableType] = []
    if len(summaries) > 1:
        parts += [Text(OVERVIEW, style="bold"), *_side_by_side(*overview_rows(summaries))]
    for benchmark, by_drafter in summaries.items():
        headings, rows = drafter_rows(by_drafter)
        shown = [at for at, heading in enumerate(headings) if heading in TERMINAL_COLUMNS]
        parts += [Text(benchmark, style="bold"), rich_table(headings, rows, shown)]
        parts += [Text(note, style="red") for note in footnotes(by_drafter)]
        headings, rows = category_rows(by_drafter)
        parts.append(Text())
        if (quality := quality_rows(by_drafter))[1]:
            parts += [Text(f"{benchmark}, task quality, %"), rich_table(*quality), Text()]
        if len(rows) > 1:
            parts += [Text(f"{benchmark}, {BY_CATEGORY.lower()}"), *_side_by_side(headings, rows)]
        for title, headings, rows in length_tables(by_drafter):
            parts += [Text(f"{benchmark}, {title.lower()}, and median time of a step")]
            parts += _side_by_side(headings, [_with_small(row) for row in rows], MAX_TERMINAL_DRAFTERS - 2)
    return parts


def _with_small(row: Row) -> Row:
    """The row with its small text inside the cells, for a terminal."""
    return Row([f"{cell} {row.small[at]}" if at in row.small else cell for at, cell in enumerate(row.cells)])


def _side_by_side(
    headings: Sequence[str], rows: Sequence[Row], max_drafters: int = MAX_TERMINAL_DRAFTERS
) -> list[RenderableType]:
    """A table with a column for each drafter, split into parts that fit into a terminal."""
    parts: list[RenderableType] = []
    for first in range(1, len(headings), max_drafters):
        columns = range(first, min(first + max_drafters, len(headings)))
        parts += [rich_table(headings, rows, [0, *columns]), Text()]
    return parts


def markdown(summaries: Summaries, context: Mapping[str, Any]) -> str:
    """The same tables in Markdown, followed by what was run."""
    lines = [f"**{escape_markdown(headline(summaries))}**", ""]
    if len(summaries) > 1:
        lines += [f"{OVERVIEW}:", "", *markdown_table(*overview_rows(summaries))]
    for benchmark, by_drafter in summaries.items():
        lines += [f"## {escape_markdown(benchmark)}", ""]
        lines += markdown_table(*drafter_rows(by_drafter))
        lines += [line for note in footnotes(by_drafter) for line in (escape_markdown(note), "")]
        if (drafts := draft_rows(by_drafter))[1]:
            lines += [f"{DRAFT_TOKENS}:", "", *markdown_table(*drafts), DRAFT_LEGEND, ""]
        if (quality := quality_rows(by_drafter))[1]:
            lines += ["Task quality, %:", "", *markdown_table(*quality)]
        headings, rows = category_rows(by_drafter)
        if len(rows) > 1:
            lines += [f"{BY_CATEGORY}:", "", *markdown_table(headings, rows)]
        for title, headings, rows in length_tables(by_drafter):
            lines += [f"{title}:", "", *markdown_table(headings, rows), LENGTH_LEGEND, ""]
    lines += ["## What was run", ""]
    lines += [
        f"- {escape_markdown(key)}: {escape_markdown(value)}" for key, value in with_counting_rule(context).items()
    ]
    return "\n".join([*lines, ""])


def drafter_rows(
    by_drafter: Mapping[str, Summary], ended: Mapping[str, str] | None = None
) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each drafter; the best drafter of each column is bold, not counting the baseline.

    Columns without any value are left out.

    Args:
        by_drafter: The summaries, by drafter.
        ended: Number of turns that ended with an end-of-sequence token, as text, by drafter.
    """
    summaries = list(by_drafter.values())
    columns = {heading: cells for heading, cell in COLUMNS if set(cells := list(map(cell, summaries))) - {"–", "0.0"}}
    best = {
        heading: _best([None if s.is_baseline else getattr(s, name) for s in summaries])
        for heading, name in RANKED.items()
    }
    rows = [
        Row(
            [cells[index] for cells in columns.values()],
            {at for at, heading in enumerate(columns) if best.get(heading) == index},
            summary.identical == summary.questions,
            {at: text for at, heading in enumerate(columns) if (text := _small(summary, heading, ended or {}))},
        )
        for index, summary in enumerate(summaries)
    ]
    return list(columns), rows


def quality_rows(by_drafter: Mapping[str, Summary]) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each drafter whose answers were graded."""
    graded = {drafter: summary.quality for drafter, summary in by_drafter.items() if summary.quality}
    grades = list(dict.fromkeys(grade for quality in graded.values() for grade in quality))
    rows = [Row([drafter, *(number(quality.get(grade)) for grade in grades)]) for drafter, quality in graded.items()]
    return ["drafter", *grades], rows


def draft_rows(by_drafter: Mapping[str, Summary]) -> tuple[list[str], list[Row]]:
    """Headings, and two rows for each drafter that drafted: what became of its draft tokens, and rates by position.

    The first row has the unconditional acceptance rates, the second one the conditional rates.
    """
    measured = [(s, s.draft_tokens) for s in by_drafter.values() if s.draft_tokens and s.draft_tokens.rates]
    deepest = min(MAX_POSITIONS, max((len(figures.rates) for _, figures in measured), default=0))
    headings = ["drafter", "draft efficiency", "wasted/token", "fed/token", *map(str, range(1, deepest + 1))]
    rows = []
    for summary, figures in measured:
        cells = [_percent(summary.draft_hit_ratio), number(figures.wasted_per_token), number(figures.fed_per_token)]
        rates = figures.rates[:deepest]
        conditional = [(rate.conditional_rate, rate.conditional_interval) for rate in rates]
        for first, own in (
            ([summary.drafter, *cells], [(rate.rate, rate.interval) for rate in rates]),
            ([CONDITIONAL, "", "", ""], conditional),
        ):
            shares = [number(share) for share, _ in own] + ["–"] * (deepest - len(rates))
            small = {at: text for at, (_, bounds) in enumerate(own, 4) if (text := _interval(bounds))}
            rows.append(Row([*first, *shares], small=small))
    return headings, rows


def legend(headings: Sequence[str], rows: Sequence[Row]) -> str:
    """Explanations of the columns of `drafter_rows`."""
    small = {headings[at] for row in rows for at in row.small}
    sentences = []
    if small & INTERVALS.keys():
        sentences.append("Small: 95 % intervals over questions; where they overlap, the best value may be chance.")
    if "ended by EOS" in small:
        sentences.append("Ended by EOS: over the turns that ended with an end-of-sequence token; small, their number.")
    sentences += [sentence for heading, sentence in MEANINGS.items() if heading in headings]
    return " ".join(sentences)


def category_rows(by_drafter: Mapping[str, Summary]) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each category with acceptance length and speed-up of each drafter but the baseline."""
    drafters = [summary for summary in by_drafter.values() if not summary.is_baseline]
    categories = dict.fromkeys(category for summary in drafters for category in summary.by_category)
    rows = [
        _length_and_speedup(category, [summary.by_category.get(category) for summary in drafters])
        for category in categories
    ]
    return ["category", *(summary.drafter for summary in drafters)], rows


def overview_rows(summaries: Summaries) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each benchmark with acceptance length and speed-up of each drafter but the baseline."""
    drafters = dict.fromkeys(name for by in summaries.values() for name, own in by.items() if not own.is_baseline)
    rows = [
        _length_and_speedup(name, [by_drafter.get(each) for each in drafters]) for name, by_drafter in summaries.items()
    ]
    return ["benchmark", *drafters], rows


def _length_and_speedup(name: str, measured: Sequence[Summary | CategorySummary | None]) -> Row:
    """A row with acceptance length and speed-up of each drafter; the longest acceptance length is bold."""
    best = _best([summary.acceptance_length if summary else None for summary in measured])
    cells = [f"{number(m.acceptance_length)} {number(_speedup(m), unit='×')}" if m else "–" for m in measured]
    return Row([name, *cells], set() if best is None else {best + 1})


def _speedup(summary: Summary | CategorySummary) -> float | None:
    """The speed-up, which a server has by wall time only."""
    is_served = isinstance(summary, Summary) and summary.served is not None
    return summary.wall_speedup if is_served else summary.speedup


def footnotes(by_drafter: Mapping[str, Summary]) -> list[str]:
    """One line for each drafter with answers that differ from the baseline's."""
    notes = []
    for summary in by_drafter.values():
        if summary.first_divergence is not None:
            question, turn, position = summary.first_divergence
            notes.append(
                f"† {summary.drafter} does not always write the text of {name_of(summary.baseline)}: they first differ "
                f"in question {question}, turn {turn + 1}, after {position} equal tokens."
            )
    return notes


def with_counting_rule(context: Mapping[str, Any]) -> dict[str, Any]:
    """What was run, with the counting rule if the context does not contain one."""
    return {**context, "counting": context.get("counting", COUNTING_RULE)}


def _small(summary: Summary, heading: str, ended: Mapping[str, str]) -> str:
    if heading == "ended by EOS":
        return ended.get(summary.drafter, "")
    if heading == "CPU ms/token":
        return _waiting(summary.core_share)
    return _interval(getattr(summary, INTERVALS[heading])) if heading in INTERVALS else ""


def _waiting(core_share: float | None) -> str:
    """Wall time / CPU time of the decoding thread, if it waited for a core."""
    return f"wall/CPU {1 / core_share:.2f}" if core_share and core_share < MIN_CORE_SHARE else ""


def _milliseconds(bounds: Sequence[float] | None) -> str:
    """Format the median and the 95th percentile of some seconds."""
    return " / ".join(number(1000 * seconds, places=int(seconds < 0.01)) for seconds in bounds) if bounds else "–"


def _cpu_milliseconds(summary: Summary) -> float | None:
    """CPU time per token; of a server, its inverse has a column of its own."""
    if not summary.cpu_seconds or not summary.tokens or summary.served:
        return None
    return 1000 * summary.cpu_seconds / summary.tokens


def _percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, places=1, unit=" %")


def _interval(bounds: Sequence[float] | None) -> str:
    """Format an interval; empty if it is unknown or has no width."""
    return f"{bounds[0]:.2f} – {bounds[1]:.2f}" if bounds and bounds[0] != bounds[1] else ""


def _identical(summary: Summary) -> str:
    percent = math.floor(1000 * summary.identical / summary.questions) / 10  # never rounds up to 100
    mark = "" if summary.identical == summary.questions else " †"
    return f"{percent:g} % ({summary.identical}/{summary.questions}){mark}"


def _best(values: Sequence[float | None]) -> int | None:
    measured = {index: value for index, value in enumerate(values) if value is not None}
    return max(measured, key=measured.__getitem__) if measured else None
