"""A table as rows of text, shown in the terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from data.files import escape_markdown


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        cells: The text of each column.
        best: Indices of the columns to print in bold.
        is_identical: Whether the drafter wrote the same tokens as the baseline.
        small: Small text below a cell, by column: its 95 % interval, or the number of turns that it is computed from.
    """

    cells: list[str]
    best: set[int] = field(default_factory=set)
    is_identical: bool = True
    small: dict[int, str] = field(default_factory=dict)


def number(value: float | None, places: int = 2, unit: str = "") -> str:
    """Format a number; a dash if nothing was measured."""
    return "–" if value is None else f"{value:.{places}f}{unit}"


def rich_table(headings: Sequence[str], rows: Sequence[Row], shown: Sequence[int] | None = None) -> Table:
    """A table for the terminal, with all columns or those whose indices are in ``shown``."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    shown = range(len(headings)) if shown is None else shown
    for index in shown:
        heading = Text(headings[index].replace(" ", "\n", 1))
        width = max(len(row.cells[index]) for row in rows)  # on a narrow terminal headings and long names break
        min_width = min(width, 16)
        result.add_column(
            heading, justify="right" if index else "left", vertical="bottom", min_width=min_width, overflow="fold"
        )
    for row in rows:
        cells = [Text(row.cells[index], style="bold" if index in row.best else "") for index in shown]
        result.add_row(*cells, style="" if row.is_identical else "red")
    return result


def markdown_table(headings: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The lines of a table in Markdown, followed by an empty line."""
    lines = [list(map(escape_markdown, headings)), ["---", *["---:"] * (len(headings) - 1)]]
    for row in rows:
        cells = [f"**{cell}**" if at in row.best else cell for at, cell in enumerate(map(escape_markdown, row.cells))]
        small = [f" ({text})" if (text := row.small.get(at)) else "" for at in range(len(cells))]
        lines.append([cell + text for cell, text in zip(cells, small, strict=True)])
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]
