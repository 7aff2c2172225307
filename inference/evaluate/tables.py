"""The tables of evaluations, for the terminal, Markdown, LaTeX and the page, and an evaluation in one sentence."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from rich import box
from rich.console import JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from data.safe_text import escape_markdown, safe_line
from inference.evaluate.answers import Answer
from inference.evaluate.breakdowns import LengthRange
from inference.evaluate.compare import Difference
from inference.evaluate.intervals import UNKNOWN, Estimate, Interval
from inference.evaluate.metrics import Category, Summary
from inference.evaluate.plan import BASELINE
from inference.evaluate.results import EvaluationResults, Summaries

COUNTING_RULE = (
    "Acceptance length = emitted tokens / base forwards, prefill excluded, over all questions (micro average)."
)
LATEX = {ord(character): f"\\{character}" for character in "#$%&_{}"}
LATEX |= {ord("\\"): r"\textbackslash{}", ord("^"): r"\textasciicircum{}", ord("~"): r"\textasciitilde{}"}
MAX_POSITIONS = 8  # of the table of draft tokens
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
        shown = [at for at, name in enumerate(self.headings) if self.terminal is None or name in self.terminal]
        size = MAX_TERMINAL_COLUMNS if self.terminal is None else max(1, len(shown))
        if self.title and shown:
            yield Text(self.title, style="bold")
        for first in range(1, len(shown), size):
            part = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
            columns = [*shown[:1], *shown[first : first + size]]
            for at in columns:
                widest = max(len(row.cells[at]) for row in self.rows)
                side: JustifyMethod = "right" if at and widest < 40 else "left"  # figures, or text
                heading = Text(self.headings[at].replace(" ", "\n", 1))  # headings and long names break
                part.add_column(heading, justify=side, vertical="bottom", min_width=min(16, widest), overflow="fold")
            for row in self.rows:
                cells = [Text(row.cells[at], style="bold" if at in row.best else "") for at in columns]
                part.add_row(*cells, style="" if row.is_identical else "red")
            yield from (part, Text())

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [list(map(escape_markdown, self.headings)), ["---", *["---:"] * (len(self.headings) - 1)]]
        for row in self.rows:
            cells = [
                f"**{cell}**" if at in row.best else cell for at, cell in enumerate(map(escape_markdown, row.cells))
            ]
            lines.append([cell + (f" ({row.small[at]})" if row.small.get(at) else "") for at, cell in enumerate(cells)])
        parts = [f"{escape_markdown(self.title)}:\n"] if self.title else []
        parts += [*(f"| {' | '.join(cells)} |" for cells in lines), f"\n{self.note}" if self.note else "", ""]
        return "\n".join(parts)

    def latex(self) -> str:
        """The table in LaTeX."""
        import pandas

        rows = [
            [f"{c} ({s})" if (s := row.small.get(at)) else c for at, c in enumerate(row.cells)] for row in self.rows
        ]
        headings, *cells = (list(map(safe_line, row)) for row in [self.headings, *rows])
        caption = safe_line(self.title).translate(LATEX)  # which pandas does not escape
        frame = pandas.DataFrame(cells, columns=headings)
        return str(frame.to_latex(index=False, escape=True, caption=caption or None))


def number(value: float | None, places: int = 2, unit: str = "") -> str:
    """Format a number; a dash if nothing was measured."""
    return "–" if value is None else f"{value:.{places}f}{unit}"


# ---- the drafters of a benchmark


@dataclass(frozen=True)
class _Column:
    """A column of the table of drafters."""

    read: Callable[[Summary], Estimate | float | None]  # its figure; the interval of an estimate stands below
    form: str = "{:.2f}"
    is_ranked: bool = False  # whether the best drafter is bold

    def estimate(self, summary: Summary) -> Estimate:
        """The figure."""
        found = self.read(summary)
        return found if isinstance(found, Estimate) else Estimate(found)

    def cell(self, summary: Summary) -> str:
        """The text of a cell."""
        value = self.estimate(summary).value
        return "–" if value is None else self.form.format(value)

    def best(self, summaries: Sequence[Summary]) -> str | None:
        """The name of the best drafter, not counting the baseline."""
        values = {s.name: self.estimate(s).value or 0.0 for s in summaries if self.is_ranked and not s.is_baseline}
        return max(values, key=values.__getitem__) if any(values.values()) else None


COLUMNS = {
    "acceptance length": _Column(lambda s: s.acceptance.length, is_ranked=True),
    "mean per question": _Column(lambda s: s.acceptance.mean, is_ranked=True),
    "ended by EOS": _Column(lambda s: s.acceptance.ended, is_ranked=True),
    "in reasoning": _Column(lambda s: s.reasoning.inside.value if s.reasoning else None),
    "in the answer": _Column(lambda s: s.reasoning.outside.value if s.reasoning else None),
    "speed-up": _Column(lambda s: s.speed.speedup, "{:.2f}×", is_ranked=True),
    "timing error": _Column(lambda s: None if s.is_baseline else _percent(s.speed.timing_error), "{:.1f} %"),
    "wall speed-up": _Column(lambda s: s.speed.wall, "{:.2f}×", is_ranked=True),
    "tokens/s": _Column(lambda s: s.speed.tokens_per_second, "{:.1f}", is_ranked=True),
    "first token, ms": _Column(lambda s: _milliseconds(s.latency.first_token if s.latency else None), "{:.0f}"),
    "inter-token, ms": _Column(lambda s: _milliseconds(s.latency.inter_token if s.latency else None), "{:.1f}"),
    "fed tokens/step": _Column(lambda s: s.acceptance.fed_per_step, "{:.1f}"),
    "of them scratch": _Column(lambda s: s.acceptance.scratch_per_step or None, "{:.1f}"),
    "draft forwards/step": _Column(lambda s: s.acceptance.draft_forwards_per_step or None, "{:.1f}"),
    "peak MiB": _Column(lambda s: s.speed.peak_bytes and s.speed.peak_bytes / 2**20, "{:.0f}"),
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


def benchmark_tables(by_drafter: Mapping[str, Summary], answers: Mapping[str, Sequence[Answer]]) -> list[Table]:
    """The tables of a benchmark that have something to show; of the answers, the ended turns are counted."""
    categories = dict.fromkeys(category for summary in by_drafter.values() for category in summary.by_category)
    by_category = {each: {name: s.by_category.get(each) for name, s in by_drafter.items()} for each in categories}
    tables = [drafters_table(by_drafter, answers), drafts_table(by_drafter), quality_table(by_drafter)]
    if len(by_category) > 1:
        tables.append(overview_table("category", by_category, _without_baseline(by_drafter)))
    tables.append(positions_table({name: s.by_position for name, s in by_drafter.items()}))
    return [table for table in tables if table.rows]


def drafters_table(by_drafter: Mapping[str, Summary], answers: Mapping[str, Sequence[Answer]]) -> Table:
    """A row for each drafter; the best of each column is bold, not counting the baseline. Empty columns go."""
    summaries = list(by_drafter.values())
    columns = {name: column for name, column in COLUMNS.items() if any(column.cell(s) != "–" for s in summaries)}
    leaders = {name: column.best(summaries) for name, column in columns.items()}
    rows = []
    for summary in summaries:
        ended = [is_ended for answer in answers.get(summary.name, ()) for is_ended in answer.ended]
        small = {name: _interval(column.estimate(summary).interval) for name, column in columns.items()}
        small["ended by EOS"] = f"{sum(ended)} of {len(ended)}" if ended else ""
        bold = {at for at, name in enumerate(columns, 1) if leaders[name] == summary.name}
        percent = math.floor(1000 * summary.identical / summary.questions) / 10  # never rounds up to 100
        is_identical = summary.identical == summary.questions
        told = f"{percent:g} % ({summary.identical}/{summary.questions}){'' if is_identical else ' †'}"
        cells = [summary.name, *(column.cell(summary) for column in columns.values()), told]
        rows.append(Row(cells, bold, is_identical, {at: small[name] for at, name in enumerate(columns, 1)}))
    notes = ["Small: 95 % intervals over questions; where they overlap, the best value may be chance."]
    notes += [meaning for name, meaning in MEANINGS.items() if name in columns]
    return Table("", ["drafter", *columns, "identical answers"], rows, " ".join(notes), TERMINAL_COLUMNS)


def drafts_table(by_drafter: Mapping[str, Summary]) -> Table:
    """Two rows for each drafter that drafted: unconditional acceptance rates by position, then the conditional ones."""
    measured = [summary for summary in by_drafter.values() if summary.acceptance.rates]
    deepest = min(MAX_POSITIONS, max((len(summary.acceptance.rates) for summary in measured), default=0))
    rows = []
    for summary in measured:
        own, rates = summary.acceptance, summary.acceptance.rates[:deepest]
        ratios = [own.accepted_per_step, own.wasted_per_token, own.fed_per_token]
        cells = [number(_percent(own.hit_ratio), 1, " %"), *map(number, ratios)]
        for first, estimates in (
            ([summary.name, *cells], [rate.rate for rate in rates]),
            (["given the one before", "", "", "", ""], [rate.conditional for rate in rates]),
        ):
            estimates += [UNKNOWN] * (deepest - len(rates))
            small = {at: _interval(each.interval) for at, each in enumerate(estimates, 5)}
            rows.append(Row([*first, *(number(each.value) for each in estimates)], small=small))
    return Table(
        "Draft tokens, and the share of steps that accept the draft token at position 1, 2, ...",
        ["drafter", "draft efficiency", "accepted/step", "wasted/token", "fed/token", *map(str, range(1, deepest + 1))],
        rows,
        "Second row: the share of the steps that accepted the position before. Efficiency: accepted / drafted tokens. "
        "Wasted: fed in vain for each emitted token. Fed: for each emitted token, 1 without a drafter.",
        terminal=(),
    )


def quality_table(by_drafter: Mapping[str, Summary]) -> Table:
    """A row for each drafter whose answers were scored."""
    scored = {name: summary.quality for name, summary in by_drafter.items() if summary.quality}
    grades = list(dict.fromkeys(grade for quality in scored.values() for grade in quality))
    rows = [Row([name, *(number(quality.get(grade)) for grade in grades)]) for name, quality in scored.items()]
    return Table("Task quality, %", ["drafter", *grades], rows)


def overview_table(
    what: str, figures: Mapping[str, Mapping[str, Summary | Category | None]], drafters: Sequence[str]
) -> Table:
    """A row for each benchmark or category with acceptance length and speed-up of each drafter; the longest is bold."""
    rows = []
    for name, by_drafter in figures.items():
        measured = [_length_and_speedup(by_drafter.get(drafter)) for drafter in drafters]
        best = max(range(len(measured)), key=lambda at: measured[at][0] or 0.0, default=-1)
        cells = ["–" if pair == (None, None) else f"{number(pair[0])} {number(pair[1], unit='×')}" for pair in measured]
        rows.append(Row([name, *cells], {best + 1}))
    return Table(f"Acceptance length and speed-up by {what}", [what, *drafters], rows)


def positions_table(ranges: Mapping[str, Sequence[LengthRange]]) -> Table:
    """A row for each range of positions; one range alone would repeat the table of drafters, and is left out."""
    by_drafter = {name: {(each.start, each.end): each for each in own} for name, own in ranges.items() if own}
    rows = []
    for start, end in sorted({each for own in by_drafter.values() for each in own}):
        found = {at: own[start, end] for at, own in enumerate(by_drafter.values(), 1) if (start, end) in own}
        cells = [number(found[at].acceptance.value if at in found else None) for at in range(1, len(by_drafter) + 1)]
        small = {at: f"{1000 * each.step_seconds:.1f} ms" for at, each in found.items()}
        rows.append(Row([f"{start:,} to {end - 1:,}", *cells], small=small))
    note = "In small type: the median time of a step. Lengths are in tokens; prefills are left out."
    title = "Acceptance length by position in the context"
    return Table(title, ["tokens", *by_drafter], rows if len(rows) > 1 else [], note, terminal=())


def footnotes(by_drafter: Mapping[str, Summary]) -> list[str]:
    """One line for each drafter with answers that differ from the baseline's."""
    return [
        f"† {summary.name} does not always write the text of {_base(summary)}: they first differ in question "
        f"{place[0]}, turn {place[1] + 1}, after {place[2]} equal tokens."
        for summary in by_drafter.values()
        if (place := summary.first_divergence)
    ]


def difference_tables(differences: Sequence[Difference]) -> list[Table]:
    """A table for each benchmark, with a row for each figure of two evaluations; regressions are red."""
    headings = ["drafter", "figure", "questions", "before", "after", "change", "interval, %", "difference"]
    rows: dict[str, list[Row]] = {}
    for each in differences:
        bounds = "–" if each.interval is None else " … ".join(f"{100 * bound:+.1f}" for bound in each.interval)
        cells = [each.drafter, each.figure, str(each.num_questions), number(each.before), number(each.after)]
        cells += [f"{100 * each.change:+.1f} %", bounds, each.verdict]
        best = {7} if each.verdict == "improvement" else set()
        rows.setdefault(each.benchmark, []).append(Row(cells, best, each.verdict != "regression"))
    shown = tuple(name for name in headings if name != "questions")
    return [Table(benchmark, headings, own, terminal=shown) for benchmark, own in rows.items()]


def all_tables(results: EvaluationResults) -> Iterator[Table]:
    """All tables of an evaluation, with their benchmark in the title."""
    if len(results.summaries) > 1:
        drafters = dict.fromkeys(name for by in results.summaries.values() for name in _without_baseline(by))
        yield overview_table("benchmark", results.summaries, list(drafters))
    for benchmark, by_drafter in results.summaries.items():
        for table in benchmark_tables(by_drafter, results.answers.get(benchmark, {})):
            yield replace(table, title=f"{benchmark}: {table.title}" if table.title else benchmark)


def terminal(results: EvaluationResults) -> Iterator[RenderableType]:
    """The tables of an evaluation, for a rich console to print one after the other."""
    for table in all_tables(results):
        yield from table.rich()
    yield from (Text(note, style="red") for by in results.summaries.values() for note in footnotes(by))
    yield Text(COUNTING_RULE, style="dim")
    yield from (Text(f"Left out: {line}.") for line in results.lines("left_out"))
    yield from (Text(f"Warning: {line}.", style="yellow") for line in results.lines("warnings"))


def markdown(results: EvaluationResults) -> str:
    """The tables of an evaluation in Markdown."""
    parts = [f"**{escape_markdown(headline(results))}**\n", f"{COUNTING_RULE}\n"]
    parts += [table.markdown() for table in all_tables(results)]
    parts += [f"{escape_markdown(note)}\n" for by in results.summaries.values() for note in footnotes(by)]
    told = [(key, value) for run in results.runs.values() for key, value in run.describe().items()]
    told += [("left out", line) for line in results.lines("left_out")]
    told += [("warning", line) for line in results.lines("warnings")]
    lines = [f"- {escape_markdown(key)}: {escape_markdown(value)}\n" for key, value in told]
    return "\n".join([*parts, "## What was run\n", "".join(lines)])


# ---- one sentence


def headline(results: EvaluationResults) -> str:
    """The evaluation in one sentence, about the fastest of the drafters that answered the most benchmarks.

    In a server it is about this drafter with each number of requests at once.
    """
    speeds = measured_speeds(results.summaries)
    every = [summary for by_drafter in results.summaries.values() for summary in by_drafter.values()]
    if not speeds:
        return f"Only {every[0].name} was run: {number(every[0].speed.tokens_per_second, places=1)} tokens per second."
    drafter = next(summary.drafter for summary in every if summary.name == next(iter(speeds)))
    own = {name: [s for s in every if s.name == name] for name in speeds}
    own = {name: summaries for name, summaries in own.items() if summaries[0].drafter == drafter}
    shown = [summary for summaries in own.values() for summary in summaries]
    identical, answers = sum(s.identical for s in shown), sum(s.questions for s in shown)
    texts = "the same text as" if identical == answers else f"in {identical} of {answers} answers the same text as"
    times = []
    for name, summaries in own.items():
        ends = [f"{end:.2f}" for end in summaries[0].speed.best.interval or ()] if len(summaries) == 1 else []
        times.append(f"{speeds[name]:.2f}x" + (f" ({' to '.join(ends)})" if len(set(ends)) > 1 else ""))
    lengths = [_geometric_mean(s.acceptance.length.value for s in summaries) for summaries in own.values()]
    accepted = f", {_listed([f'{length:.1f}' for length in lengths])} tokens per base forward" if all(lengths) else ""
    num_benchmarks = len(next(iter(own.values())))
    num_questions = sum(summary.questions for summary in next(iter(own.values())))
    over = f"{num_questions} question{'' if num_questions == 1 else 's'}"
    over += f" of {num_benchmarks} benchmarks (geometric means)" if num_benchmarks > 1 else ""
    served = f", in {results.conditions.engine}" if shown[0].latency else ""
    return (
        f"{_listed(list(own))} {'write' if len(own) > 1 else 'writes'} {texts} {_base(shown[0])} at {_listed(times)} "
        f"its speed{accepted}, over {over}{served}."
    )


def measured_speeds(summaries: Summaries) -> dict[str, float]:
    """The geometric mean speed-up of each drafter that answered the most benchmarks, the fastest first."""
    by_name: dict[str, list[float | None]] = {}
    for by_drafter in summaries.values():
        for drafter in _without_baseline(by_drafter):
            by_name.setdefault(drafter, []).append(by_drafter[drafter].speed.best.value)
    most = max(map(len, by_name.values()), default=0)
    speeds = {drafter: _geometric_mean(each) for drafter, each in by_name.items() if len(each) == most}
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def _base(summary: Summary) -> str:
    return "the base" if summary.baseline == BASELINE else summary.baseline


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _geometric_mean(values: Iterable[float | None]) -> float:
    measured = [value for value in values if value]
    return geometric_mean(measured) if measured else 0.0


# ---- figures in cells


def _without_baseline(by_drafter: Mapping[str, Summary]) -> list[str]:
    return [name for name, summary in by_drafter.items() if not summary.is_baseline]


def _length_and_speedup(of: Summary | Category | None) -> tuple[float | None, float | None]:
    if isinstance(of, Summary):
        return of.acceptance.length.value, of.speed.best.value
    return (of.acceptance, of.speedup) if of else (None, None)


def _milliseconds(percentiles: Interval | None) -> Estimate:
    """The median of some milliseconds, and below it the median and the 95th percentile."""
    return Estimate(1000 * percentiles[0], (1000 * percentiles[0], 1000 * percentiles[1])) if percentiles else UNKNOWN


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _interval(bounds: Interval | None) -> str:
    """Format an interval; empty if it is unknown or has no width."""
    return f"{bounds[0]:.2f} – {bounds[1]:.2f}" if bounds and bounds[0] != bounds[1] else ""
