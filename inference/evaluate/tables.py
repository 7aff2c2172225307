"""The tables of evaluations, for the terminal, Markdown, LaTeX and the page, and an evaluation in one sentence."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pandas
from rich import box
from rich.console import JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from data.files import atomic_write, write_text
from data.safe_text import escape_markdown, safe_line
from inference.evaluate.conditions import BASELINE, describe
from inference.evaluate.figures import Category, LengthRange, Summary
from inference.evaluate.intervals import UNKNOWN, Estimate, Interval
from inference.evaluate.results import EvaluationResults
from inference.options import Format

COUNTING_RULE = (
    "Acceptance length = emitted tokens / base forwards, prefill excluded, over all questions (micro average)."
)
MAX_TERMINAL_COLUMNS = 7  # side by side in one table


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    cells: list[str]
    best: set[int] = field(default_factory=set)  # columns in bold
    is_identical: bool = True  # whether the drafter wrote the baseline's tokens; otherwise the row is red
    small: dict[int, str] = field(default_factory=dict)  # small text below a cell, such as its interval


@dataclass(frozen=True)
class Table:
    """A table with its title and what a reader must know."""

    title: str
    headings: list[str]
    rows: list[Row]
    note: str = ""
    terminal: tuple[str, ...] | None = None  # the columns that a terminal shows; None for all

    def rich(self) -> Iterator[RenderableType]:
        """The table for the terminal, in parts if it has many columns."""
        columns = [at for at, name in enumerate(self.headings) if self.terminal is None or name in self.terminal]
        size = MAX_TERMINAL_COLUMNS if self.terminal is None else max(1, len(columns))
        if self.title and columns:
            yield Text(self.title, style="bold")
        for first in range(1, len(columns), size):
            part = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
            places = [*columns[:1], *columns[first : first + size]]
            for at in places:
                widest = max(len(row.cells[at]) for row in self.rows)
                side: JustifyMethod = "right" if at and widest < 40 else "left"  # figures, or text
                heading = Text(self.headings[at].replace(" ", "\n", 1))  # headings and long names break
                part.add_column(heading, justify=side, vertical="bottom", min_width=min(16, widest), overflow="fold")
            for row in self.rows:
                cells = [Text(row.cells[at], style="bold" if at in row.best else "") for at in places]
                part.add_row(*cells, style="" if row.is_identical else "red")
            yield from (part, Text())

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [list(map(escape_markdown, self.headings)), ["---", *["---:"] * (len(self.headings) - 1)]]
        for row in self.rows:
            cells = [escape_markdown(cell) for cell in row.cells]
            for at in row.best:
                cells[at] = f"**{cells[at]}**"
            lines.append([cell + (f" ({row.small[at]})" if row.small.get(at) else "") for at, cell in enumerate(cells)])
        parts = [f"{escape_markdown(self.title)}:\n"] if self.title else []
        parts += [*(f"| {' | '.join(cells)} |" for cells in lines), f"\n{self.note}" if self.note else "", ""]
        return "\n".join(parts)

    def latex(self) -> str:
        """The table in LaTeX, below a comment with its title."""
        rows = [
            [f"{cell} ({row.small[at]})" if row.small.get(at) else cell for at, cell in enumerate(row.cells)]
            for row in self.rows
        ]
        headings, *cells = (list(map(safe_line, row)) for row in [self.headings, *rows])
        frame = pandas.DataFrame(cells, columns=headings)
        return f"% {safe_line(self.title)}\n{frame.to_latex(index=False, escape=True)}"


def number(value: float | None, places: int = 2, unit: str = "") -> str:
    """Format a number; a dash if nothing was measured."""
    return "–" if value is None else f"{value:.{places}f}{unit}"


# ---- the drafters of a benchmark


@dataclass(frozen=True)
class _Column:
    """A column of the table of drafters."""

    read: Callable[[Summary], Estimate | float | None]  # its figure; the interval of an estimate stands below
    places: int = 2
    unit: str = ""
    is_ranked: bool = False  # whether the best drafter is bold

    def estimate(self, summary: Summary) -> Estimate:
        """The figure."""
        figure = self.read(summary)
        return figure if isinstance(figure, Estimate) else Estimate(figure)

    def cell(self, summary: Summary) -> str:
        """The text of a cell."""
        return number(self.estimate(summary).value, self.places, self.unit)

    def best(self, summaries: Sequence[Summary]) -> str | None:
        """The name of the best drafter, not counting the baseline."""
        values = {s.name: self.estimate(s).value or 0.0 for s in summaries if self.is_ranked and not s.is_baseline}
        return max(values, key=values.__getitem__) if any(values.values()) else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _milliseconds(percentiles: Interval | None) -> Estimate:
    """The median in milliseconds, and below it the median and the 95th percentile."""
    return Estimate(1000 * percentiles[0], (1000 * percentiles[0], 1000 * percentiles[1])) if percentiles else UNKNOWN


COLUMNS = {
    "acceptance length": _Column(lambda s: s.acceptance.length, is_ranked=True),
    "mean per question": _Column(lambda s: s.acceptance.mean, is_ranked=True),
    "ended by EOS": _Column(lambda s: s.acceptance.ended, is_ranked=True),
    "in reasoning": _Column(lambda s: s.reasoning.inside.value if s.reasoning else None),
    "in the answer": _Column(lambda s: s.reasoning.outside.value if s.reasoning else None),
    "speed-up": _Column(lambda s: s.speed.speedup, unit="×", is_ranked=True),
    "timing error": _Column(lambda s: None if s.is_baseline else _percent(s.speed.timing_error), 1, " %"),
    "wall speed-up": _Column(lambda s: s.speed.wall, unit="×", is_ranked=True),
    "tokens/s": _Column(lambda s: s.speed.tokens_per_second, 1, is_ranked=True),
    "first token, ms": _Column(lambda s: _milliseconds(s.latency.first_token if s.latency else None), 0),
    "inter-token, ms": _Column(lambda s: _milliseconds(s.latency.inter_token if s.latency else None), 1),
    "fed tokens/step": _Column(lambda s: s.acceptance.fed_per_step, 1),
    "of them scratch": _Column(lambda s: s.acceptance.scratch_per_step or None, 1),
    "draft forwards/step": _Column(lambda s: s.acceptance.draft_forwards_per_step or None, 1),
    "peak MiB": _Column(lambda s: s.speed.peak_bytes and s.speed.peak_bytes / 2**20, 0),
}
MEANINGS = {
    "ended by EOS": "Ended by EOS: over the turns that ended with an end token.",
    "in reasoning": "In reasoning, in the answer: acceptance length inside and outside of the template's marks.",
    "speed-up": "Speed-up: by median step times, which other work hardly changes.",
    "timing error": "Timing error: half of the 95 % interval that timing leaves the speed-up on these questions.",
    "wall speed-up": "Wall speed-up: by the clock.",
    "first token, ms": "First token: from a request to its first token; small, median and 95th percentile.",
    "inter-token, ms": "Inter-token: between two tokens; those that arrive together divide the time before equally.",
}
TERMINAL_COLUMNS = (
    *("drafter", "acceptance length", "speed-up", "wall speed-up", "tokens/s", "fed tokens/step"),
    *("inter-token, ms", "identical answers"),
)


def benchmark_tables(by_drafter: Mapping[str, Summary]) -> list[Table]:
    """The tables of a benchmark that have something to show."""
    tables = [drafters_table(by_drafter), quality_table(by_drafter)]
    if any(len(summary.by_category) > 1 for summary in by_drafter.values()):
        categories = {name: by_drafter[name].by_category for name in without_baseline(by_drafter)}
        tables.append(overview_table("category", categories))
    tables.append(positions_table({name: summary.by_position for name, summary in by_drafter.items()}))
    return [table for table in tables if table.rows]


def drafters_table(by_drafter: Mapping[str, Summary]) -> Table:
    """A row for each drafter; the best of each column is bold, not counting the baseline. Empty columns go."""
    summaries = list(by_drafter.values())
    columns = {name: column for name, column in COLUMNS.items() if any(column.cell(s) != "–" for s in summaries)}
    leaders = {name: column.best(summaries) for name, column in columns.items()}
    rows = []
    for summary in summaries:
        small = {at: _interval(column.estimate(summary).interval) for at, column in enumerate(columns.values(), 1)}
        percent = math.floor(1000 * summary.identical / summary.questions) / 10  # never rounds up to 100
        is_identical = summary.identical == summary.questions
        identical = f"{percent:g} % ({summary.identical}/{summary.questions}){'' if is_identical else ' †'}"
        cells = [summary.name, *(column.cell(summary) for column in columns.values()), identical]
        best = {at for at, name in enumerate(columns, 1) if leaders[name] == summary.name}
        rows.append(Row(cells, best, is_identical, small))
    notes = ["Small: 95 % intervals over questions; where they overlap, the best value may be chance."]
    notes += [meaning for name, meaning in MEANINGS.items() if name in columns]
    return Table("", ["drafter", *columns, "identical answers"], rows, " ".join(notes), TERMINAL_COLUMNS)


def quality_table(by_drafter: Mapping[str, Summary]) -> Table:
    """A row for each drafter whose answers were scored."""
    scored = {name: summary.quality for name, summary in by_drafter.items() if summary.quality}
    grades = list(dict.fromkeys(grade for quality in scored.values() for grade in quality))
    rows = [Row([name, *(number(quality.get(grade)) for grade in grades)]) for name, quality in scored.items()]
    return Table("Task quality, %", ["drafter", *grades], rows)


def overview_table(what: str, figures: Mapping[str, Mapping[str, Summary | Category | None]]) -> Table:
    """A row for each drafter with its acceptance length and speed-up by category or benchmark; the longest is bold."""
    columns = list(dict.fromkeys(name for by_column in figures.values() for name in by_column))
    pairs = {name: [_length_and_speedup(by.get(column)) for column in columns] for name, by in figures.items()}
    longest = [max((row[at][0] or 0.0 for row in pairs.values()), default=0.0) for at in range(len(columns))]
    rows = []
    for name, row in pairs.items():
        cells = ["–" if pair == (None, None) else f"{number(pair[0])} {number(pair[1], unit='×')}" for pair in row]
        best = {at for at, (pair, most) in enumerate(zip(row, longest, strict=True), 1) if pair[0] == most}
        rows.append(Row([name, *cells], best))
    return Table(f"Acceptance length and speed-up by {what}", ["drafter", *columns], rows)


def positions_table(ranges: Mapping[str, Sequence[LengthRange]]) -> Table:
    """A row for each range of positions; one range alone would repeat the table of drafters, and is left out."""
    by_start = {name: {part.start: part for part in parts} for name, parts in ranges.items() if parts}
    ends = {part.start: part.end for parts in ranges.values() for part in parts}
    rows = []
    for start, end in sorted(ends.items()):
        parts = {at: parts[start] for at, parts in enumerate(by_start.values(), 1) if start in parts}
        cells = [number(parts[at].acceptance.value if at in parts else None) for at in range(1, len(by_start) + 1)]
        small = {at: f"{1000 * part.step_seconds:.1f} ms" for at, part in parts.items()}
        rows.append(Row([f"{start:,} to {end - 1:,}", *cells], small=small))
    note = "In small type: the median time of a step. Lengths are in tokens; prefills are left out."
    title = "Acceptance length by position in the context"
    return Table(title, ["tokens", *by_start], rows if len(rows) > 1 else [], note, terminal=())


def footnotes(by_drafter: Mapping[str, Summary]) -> list[str]:
    """One line for each drafter with answers that differ from the baseline's."""
    return [
        f"† {summary.name} does not always write the text of {_base(summary)}: they first differ in question "
        f"{place[0]}, turn {place[1] + 1}, after {place[2]} equal tokens."
        for summary in by_drafter.values()
        if (place := summary.first_divergence)
    ]


# ---- an evaluation, and several


def all_tables(results: EvaluationResults) -> Iterator[Table]:
    """All tables of an evaluation, with their benchmark in the title."""
    if len(results.summaries) > 1:
        yield evaluations_table([results])
    for benchmark, by_drafter in results.summaries.items():
        for table in benchmark_tables(by_drafter):
            yield replace(table, title=f"{benchmark}: {table.title}" if table.title else benchmark)


def evaluations_table(evaluations: Sequence[EvaluationResults]) -> Table:
    """A row for each drafter of some evaluations, relative to its own baseline, with a column for each benchmark."""
    figures: dict[str, dict[str, Summary | Category | None]] = {}
    for results in evaluations:
        for benchmark, by_drafter in results.summaries.items():
            for drafter in without_baseline(by_drafter):
                name = f"{results.name}: {drafter}" if len(evaluations) > 1 else drafter
                figures.setdefault(name, {})[benchmark] = by_drafter[drafter]
    table = overview_table("benchmark", figures)
    if len(evaluations) > 1:  # whose bases may differ
        table = replace(table, rows=[replace(row, best=set()) for row in table.rows])
    return table


def terminal(results: EvaluationResults) -> Iterator[RenderableType]:
    """The tables of an evaluation, for a rich console to print one after the other."""
    for table in all_tables(results):
        yield from table.rich()
    yield from (Text(note, style="red") for by in results.summaries.values() for note in footnotes(by))
    yield Text(COUNTING_RULE, style="dim")
    yield from (Text(f"Left out: {line}.") for line in results.record.left_out)
    yield from (Text(f"Warning: {line}.", style="yellow") for line in results.record.warnings)


def markdown(results: EvaluationResults) -> str:
    """The tables of an evaluation in Markdown."""
    parts = [f"**{escape_markdown(headline(results))}**\n", f"{COUNTING_RULE}\n"]
    parts += [table.markdown() for table in all_tables(results)]
    parts += [f"{escape_markdown(note)}\n" for by in results.summaries.values() for note in footnotes(by)]
    lines = list(describe(results.conditions, results.record).items())
    lines += [("left out", line) for line in results.record.left_out]
    lines += [("warning", line) for line in results.record.warnings]
    items = [f"- {escape_markdown(name)}: {escape_markdown(line)}\n" for name, line in lines]
    return "\n".join([*parts, "## What was run\n", "".join(items)])


def headline(results: EvaluationResults) -> str:
    """The evaluation in one sentence, about the fastest drafter."""
    name = fastest(results)
    if name is None:
        (alone, *_), *_ = (list(by_drafter.values()) for by_drafter in results.summaries.values())
        return f"Only {alone.name} was run: {number(alone.speed.tokens_per_second, places=1)} tokens per second."
    summaries = [by_drafter[name] for by_drafter in results.summaries.values() if name in by_drafter]
    identical, questions = sum(s.identical for s in summaries), sum(s.questions for s in summaries)
    texts = "the same text as" if identical == questions else f"in {identical} of {questions} answers the same text as"
    ends = [f"{end:.2f}" for end in summaries[0].speed.best.interval or ()] if len(summaries) == 1 else []
    speed = f"{_geometric_mean(s.speed.best.value for s in summaries):.2f}x"
    speed += f" ({' to '.join(ends)})" if len(set(ends)) > 1 else ""
    length = _geometric_mean(s.acceptance.length.value for s in summaries)
    accepted = f", {length:.1f} tokens per base forward" if length else ""
    over = f"{questions} question{'' if questions == 1 else 's'}"
    over += f" of {len(summaries)} benchmarks (geometric means)" if len(summaries) > 1 else ""
    return f"{name} writes {texts} {_base(summaries[0])} at {speed} its speed{accepted}, over {over}."


def fastest(results: EvaluationResults) -> str | None:
    """The drafter with the highest geometric mean of speed-ups, of those that answered the most benchmarks."""
    speeds: dict[str, list[float | None]] = {}
    for by_drafter in results.summaries.values():
        for name in without_baseline(by_drafter):
            speeds.setdefault(name, []).append(by_drafter[name].speed.best.value)
    return max(speeds, key=lambda name: (len(speeds[name]), _geometric_mean(speeds[name])), default=None)


def _base(summary: Summary) -> str:
    return "the base" if summary.baseline == BASELINE else summary.baseline


def _geometric_mean(values: Iterable[float | None]) -> float:
    measured = [value for value in values if value]
    return geometric_mean(measured) if measured else 0.0


def without_baseline(by_drafter: Mapping[str, Summary]) -> list[str]:
    """The names of the drafters on a benchmark, without the baselines."""
    return [name for name, summary in by_drafter.items() if not summary.is_baseline]


def _length_and_speedup(of: Summary | Category | None) -> tuple[float | None, float | None]:
    if isinstance(of, Summary):
        return of.acceptance.length.value, of.speed.best.value
    return (of.acceptance, of.speedup) if of else (None, None)


def _interval(bounds: Interval | None) -> str:
    """Format an interval; empty if it is unknown or has no width."""
    return f"{bounds[0]:.2f} – {bounds[1]:.2f}" if bounds and bounds[0] != bounds[1] else ""


# ---- files


def table_path(page: Path, kind: Format) -> Path:
    """The file of a format beside a page."""
    return page.with_suffix(".tex" if kind == "latex" else f".{kind}")


def write_tables(
    page: Path, formats: Sequence[Format], markdown: str, latex: Sequence[str], rows: Sequence[dict[str, Any]]
) -> None:
    """Write the tables and figures of a page beside it, with its name and the suffix of each format.

    The tables are given in Markdown and in LaTeX; ``rows`` of figures are for CSV and Parquet.
    """
    for kind in dict.fromkeys(formats):
        path = table_path(page, kind)
        if kind in ("md", "latex"):
            write_text(path, markdown if kind == "md" else "\n".join(latex))
        else:
            frame = pandas.DataFrame([_flat(row, kind == "csv") for row in rows])
            with atomic_write(path) as new:
                frame.to_csv(new, index=False) if kind == "csv" else frame.to_parquet(new, index=False)


def figure_rows(evaluations: Sequence[EvaluationResults]) -> list[dict[str, Any]]:
    """A row for each drafter on each benchmark of some evaluations: the conditions, and its figures by name.

    `write_tables` names the figures by their paths in results.json, and items of lists by their place:
    ``acceptance.rates.1.rate.value`` is the rate of the first position.
    """
    rows = []
    for results in evaluations:
        conditions = results.conditions
        shared = {"evaluation": results.name, "base": conditions.base, **conditions.same()}
        for benchmark, by_drafter in results.summaries.items():
            names = {**shared, "benchmark": benchmark, "max_new_tokens": conditions.caps.get(benchmark)}
            rows += [names | asdict(summary) for summary in by_drafter.values()]
    return rows


def _flat(value: Any, is_csv: bool, path: str = "") -> dict[str, Any]:
    """The figures in a value by their paths; in CSV, no text is a formula of a spreadsheet."""
    if isinstance(value, (list, tuple)):
        ends = ("low", "high") if path.endswith("interval") else range(1, len(value) + 1)
        value = dict(zip(ends, value, strict=True))
    if isinstance(value, dict):
        parts = [_flat(item, is_csv, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
        return {key: item for part in parts for key, item in part.items()}
    if isinstance(value, str):
        value = "'" * (is_csv and value.lstrip().startswith(("=", "+", "-", "@"))) + safe_line(value)
    return {safe_line(path): value}
