"""Tables of acceptance length and step time by position in the context and by length of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from inference.reporting.rows import Row, number
from inference.results.length_figures import LengthRange
from inference.results.metrics import Summary

LENGTHS = {
    "by_position": "Acceptance length by position in the context",
    "by_prompt": "Acceptance length by length of the prompt",
}
LENGTH_LEGEND = (
    "In small type: the median time of a step. Positions and lengths are in tokens, the prompt and the earlier turns "
    "included; prefills are left out."
)


def length_tables(by_drafter: Mapping[str, Summary]) -> list[tuple[str, list[str], list[Row]]]:
    """Title, headings and rows of each table by length: a row for each range, with all drafters.

    A table with a single range would repeat the table of drafters, and is left out.
    """
    tables = []
    for kind, title in LENGTHS.items():
        measured = {
            drafter: {(own.start, own.end): (own.acceptance_length, seconds) for own, seconds in ranges}
            for drafter, summary in by_drafter.items()
            if (ranges := length_ranges(summary, kind))
        }
        rows = []
        for start, end in sorted({each for own in measured.values() for each in own}):
            figures = [own.get((start, end), (None, None)) for own in measured.values()]
            small = {
                at: f"{1000 * seconds:.1f} ms" for at, (_, seconds) in enumerate(figures, 1) if seconds is not None
            }
            rows.append(Row([f"{start:,} to {end - 1:,}", *(number(length) for length, _ in figures)], small=small))
        if len(rows) > 1:
            tables.append((title, ["tokens", *measured], rows))
    return tables


def length_ranges(summary: Summary, kind: str) -> list[tuple[LengthRange, float | None]]:
    """The ranges of `LengthFigures` with the median seconds of a step in each; none in results of older versions.

    Args:
        summary: The summary.
        kind: ``by_position`` or ``by_prompt``.
    """
    if summary.lengths is None or summary.length_seconds is None:
        return []
    return list(zip(getattr(summary.lengths, kind), getattr(summary.length_seconds, kind), strict=False))
