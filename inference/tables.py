"""The tables of an evaluation, for the terminal and for Markdown, and its one-sentence headline."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from inference.metrics import Summary

Summaries = Mapping[str, Mapping[str, Summary]]  # by benchmark, by drafter

COUNTING_RULE = "Acceptance length = emitted tokens / base forwards, prefill excluded, micro average."
COLUMNS = (
    ("drafter", lambda s: s.drafter),
    ("acceptance length", lambda s: number(s.acceptance_length)),
    ("mean per question", lambda s: number(s.acceptance_length_mean)),
    ("ended by EOS", lambda s: number(s.acceptance_length_ended)),
    ("speed-up", lambda s: number(s.speedup, unit="×")),
    ("tokens/s", lambda s: number(s.tokens_per_second, places=1)),
    ("fed tokens/step", lambda s: number(s.fed_per_step, places=1)),
    ("of them scratch", lambda s: number(s.scratch_per_step, places=1)),
    ("draft forwards/step", lambda s: number(s.draft_forwards_per_step, places=1)),
    ("identical answers", lambda s: _identical(s)),
)
RANKED = {  # by column
    1: "acceptance_length",
    2: "acceptance_length_mean",
    3: "acceptance_length_ended",
    4: "speedup",
    5: "tokens_per_second",
}
TERMINAL_COLUMNS = (0, 1, 4, 5, 6, 9)  # of COLUMNS: what eighty characters hold
MAX_TERMINAL_DRAFTERS = 6  # side by side, for the same reason


@dataclass(frozen=True)
class Row:
    """A line of a table; ``best`` are the columns to stress, ``is_identical`` tells lossless drafters from others."""

    cells: list[str]
    best: set[int]
    is_identical: bool = True


def table(summaries: Summaries) -> list[RenderableType]:
    """The tables of all benchmarks with their titles and footnotes, for a rich console to print one by one."""
    parts: list[RenderableType] = []
    for benchmark, by_drafter in summaries.items():
        headings = [heading for heading, _ in COLUMNS]
        parts += [Text(benchmark, style="bold"), _rich_table(headings, drafter_rows(by_drafter), TERMINAL_COLUMNS)]
        parts += [Text(note, style="red") for note in footnotes(by_drafter)]
        headings, rows = category_rows(by_drafter)
        parts.append(Text())
        if len(rows) > 1:
            parts.append(Text(f"{benchmark}, acceptance length and speed-up by category"))
            for first in range(1, len(headings), MAX_TERMINAL_DRAFTERS):
                columns = range(first, min(first + MAX_TERMINAL_DRAFTERS, len(headings)))
                parts += [_rich_table(headings, rows, [0, *columns]), Text()]
    return parts


def markdown(summaries: Summaries, context: Mapping[str, Any]) -> str:
    """The same tables in Markdown, and what was run."""
    lines = [f"**{_escape(headline(summaries))}**", ""]
    for benchmark, by_drafter in summaries.items():
        lines += [f"## {_escape(benchmark)}", ""]
        lines += _markdown_table([heading for heading, _ in COLUMNS], drafter_rows(by_drafter))
        lines += [line for note in footnotes(by_drafter) for line in (_escape(note), "")]
        headings, rows = category_rows(by_drafter)
        if len(rows) > 1:
            lines += ["Acceptance length and speed-up by category:", "", *_markdown_table(headings, rows)]
    lines += ["## What was run", ""]
    lines += [f"- {_escape(str(key))}: {_escape(str(value))}" for key, value in counted(context).items()]
    return "\n".join([*lines, ""])


def headline(summaries: Summaries) -> str:
    """The evaluation in one sentence about the fastest drafter over all benchmarks."""
    runs: dict[str, list[Summary]] = {}
    for by_drafter in summaries.values():
        for drafter, summary in by_drafter.items():
            runs.setdefault(drafter, []).append(summary)
    baseline = next(iter(runs.values()))[0].baseline
    speedups = {d: _geometric_mean([s.speedup for s in own]) for d, own in runs.items() if d != baseline}
    if not speedups:
        return f"Only {baseline} was run: {number(runs[baseline][0].tokens_per_second, places=1)} tokens per second."
    best = max(speedups, key=speedups.__getitem__)
    identical, questions = sum(s.identical for s in runs[best]), sum(s.questions for s in runs[best])
    what = "the same text as" if identical == questions else f"in {identical} of {questions} answers the same text as"
    speed = f"{speedups[best]:.1f}x faster" if speedups[best] >= 1 else f"at {speedups[best]:.2f}x its speed"
    length = _geometric_mean([s.acceptance_length for s in runs[best]])
    over = f" (geometric means over {len(runs[best])} benchmarks)" if len(runs[best]) > 1 else ""
    return f"{best} writes {what} {_name(baseline)}, {speed}, {length:.1f} tokens per base forward{over}."


def drafter_rows(by_drafter: Mapping[str, Summary]) -> list[Row]:
    """A row of `COLUMNS` for each drafter; the best of the drafters, the baseline aside, is stressed."""
    summaries = list(by_drafter.values())
    best = {
        column: _best([None if s.is_baseline else getattr(s, name) for s in summaries])
        for column, name in RANKED.items()
    }
    return [
        Row(
            [cell(summary) for _, cell in COLUMNS],
            {column for column, winner in best.items() if winner == index},
            summary.identical == summary.questions,
        )
        for index, summary in enumerate(summaries)
    ]


def category_rows(by_drafter: Mapping[str, Summary]) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each category with acceptance length and speed-up of each drafter but the baseline."""
    drafters = [summary for summary in by_drafter.values() if not summary.is_baseline]
    rows = []
    for category in dict.fromkeys(category for summary in drafters for category in summary.by_category):
        measured = [summary.by_category.get(category) for summary in drafters]
        lengths = [found.acceptance_length if found else None for found in measured]
        best = _best(lengths)
        cells = [f"{number(m.acceptance_length)} {number(m.speedup, unit='×')}" if m else "–" for m in measured]
        rows.append(Row([category, *cells], set() if best is None else {best + 1}))
    return ["category", *(summary.drafter for summary in drafters)], rows


def footnotes(by_drafter: Mapping[str, Summary]) -> list[str]:
    """A line for each drafter whose answers are not all the baseline's."""
    notes = []
    for summary in by_drafter.values():
        if summary.first_divergence is not None:
            question, turn, position = summary.first_divergence
            notes.append(
                f"† {summary.drafter} does not always write what {_name(summary.baseline)} writes: they part first in "
                f"question {question}, turn {turn + 1}, after {position} equal tokens."
            )
    return notes


def counted(context: Mapping[str, Any]) -> dict[str, Any]:
    """What was run, and how it was counted unless that is said already."""
    return {**context, "counting": context.get("counting", COUNTING_RULE)}


def number(value: float | None, places: int = 2, unit: str = "") -> str:
    """The number for a reader; a dash where nothing was measured."""
    return "–" if value is None else f"{value:.{places}f}{unit}"


def _name(baseline: str) -> str:
    return "the base" if baseline == "none" else baseline


def _identical(summary: Summary) -> str:
    percent = math.floor(1000 * summary.identical / summary.questions) / 10  # never rounds up to 100
    mark = "" if summary.identical == summary.questions else " †"
    return f"{percent:g} % ({summary.identical}/{summary.questions}){mark}"


def _best(values: Sequence[float | None]) -> int | None:
    measured = {index: value for index, value in enumerate(values) if value is not None}
    return max(measured, key=measured.__getitem__) if measured else None


def _geometric_mean(values: Sequence[float | None]) -> float:
    measured = [value for value in values if value]
    return math.exp(sum(map(math.log, measured)) / len(measured)) if measured else 0.0


def _rich_table(headings: Sequence[str], rows: Sequence[Row], shown: Sequence[int]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index in shown:
        heading = Text(headings[index].replace(" ", "\n", 1))
        width = max(len(row.cells[index]) for row in rows)  # where room is short, headings and long names break
        justify = "right" if index else "left"
        result.add_column(heading, justify=justify, vertical="bottom", min_width=min(width, 16), overflow="fold")
    for row in rows:
        cells = [Text(row.cells[index], style="bold" if index in row.best else "") for index in shown]
        result.add_row(*cells, style="" if row.is_identical else "red")
    return result


def _markdown_table(headings: Sequence[str], rows: Sequence[Row]) -> list[str]:
    lines = [list(map(_escape, headings)), ["---", *["---:"] * (len(headings) - 1)]]
    for row in rows:
        cells = [_escape(cell) for cell in row.cells]
        lines.append([f"**{cell}**" if index in row.best else cell for index, cell in enumerate(cells)])
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _escape(text: str) -> str:
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", text.replace("\n", " "))
