"""Two evaluations compared, as tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data.files import escape_markdown
from inference.reporting.rows import Row, markdown_table, number
from inference.results.comparison import MIN_QUESTIONS, Difference, Unpaired

NOTE = (
    "Differences are paired by question. The intervals are simultaneous: two equal evaluations have anything marked in "
    f"at most 5 % of cases. Not judged: fewer than {MIN_QUESTIONS} questions, or a timing error that is unknown."
)

TERMINAL_COLUMNS = (1, 2, 4, 5, 6, 7, 8)  # without benchmark and questions


def difference_rows(differences: Sequence[Difference]) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each figure; regressions count as not identical, and so are shown in red."""
    headings = ["benchmark", "drafter", "figure", "questions", "before", "after", "change", "interval, %", "difference"]
    rows = []
    for each in differences:
        bounds = "–" if each.interval is None else " … ".join(f"{100 * bound:+.1f}" for bound in each.interval)
        cells = [each.benchmark, each.drafter, each.figure, str(each.num_questions), number(each.before)]
        cells += [number(each.after), f"{100 * each.change:+.1f} %", bounds, each.verdict]
        rows.append(Row(cells, {8} if each.verdict == "improvement" else set(), each.verdict != "regression"))
    return headings, rows


def markdown(
    names: Sequence[str], differences: Sequence[Difference], conditions: Sequence[str], unpaired: Unpaired
) -> str:
    """The table in Markdown, with the conditions in which the evaluations differ, and what is not compared.

    Args:
        names: Names of the second evaluation and of the first one.
        differences: The differences.
        conditions: One line for each condition in which the evaluations differ.
        unpaired: What only one of them has.
    """
    lines = [f"# {' compared with '.join(names)}", "", *markdown_table(*difference_rows(differences)), NOTE, ""]
    notes = [f"The evaluations differ in {escape_markdown(line)}" for line in conditions]
    notes += [f"Missing in {names[0]}: {escape_markdown(line)}" for line in unpaired.before]
    notes += [f"Only in {names[0]}: {escape_markdown(line)}" for line in unpaired.after]
    return "\n".join([*lines, *(f"- {note}" for note in notes), ""])


def records(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """The differences as flat rows for CSV, Parquet and JSON."""
    rows = []
    for each in differences:
        row = asdict(each) | {"change": each.change, "verdict": each.verdict}
        low, high = row.pop("interval") or (None, None)
        rows.append(row | {"change_low": low, "change_high": high})
    return rows
