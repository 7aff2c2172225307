"""What a sweep measured, ranked and written as sweep.json, sweep.md and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from data.files import escape_markdown, safe_line, write_text
from inference.reporting.rows import number
from inference.tuning.grid import Axis, Cell
from inference.tuning.sweep_plots import short

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "acceptance length": lambda summary: number(summary["acceptance_length"]),
    "speed-up": lambda summary: number(summary["speedup"], unit="×"),
    "its noise": lambda summary: "–" if summary["noise"] is None else f"± {summary['noise']:.0%}",
    "tokens/s": lambda summary: number(summary["tokens_per_second"], places=1),
    "fed tokens/step": lambda summary: number(summary["fed_per_step"], places=1),
    "identical": lambda summary: f"{summary['identical']}/{summary['questions']}",
}
RANKINGS = {"speed-up": "speedup", "acceptance length": "acceptance_length"}
MAX_CELLS_SHOWN = 20  # in the terminal


@dataclass(frozen=True)
class MeasuredCell:
    """A cell and its measurements.

    Args:
        cell: The cell.
        summary: The fields of a `metrics.Summary`.
        base_speed: Tokens per second of plain decoding, measured together with the cell.
    """

    cell: Cell
    summary: dict[str, Any]
    base_speed: float


def ranked(measured: Sequence[MeasuredCell], metric: str) -> list[MeasuredCell]:
    """Sort the cells by a metric, best first; cells without the metric come last."""
    return sorted(measured, key=lambda each: -(each.summary[metric] or 0.0))


def noise(measured: Sequence[MeasuredCell]) -> float:
    """How much the speed of plain decoding varies between cells: (fastest - slowest) / slowest.

    Plain decoding does the same work each time, so all of this is noise of the machine.
    """
    speeds = [each.base_speed for each in measured]
    return max(speeds) / min(speeds) - 1


def conclusions(measured: Sequence[MeasuredCell]) -> list[str]:
    """The best cells and what limits the comparison, one line each."""
    lines = []
    for title, metric in (("fastest", "speedup"), ("longest acceptance", "acceptance_length")):
        best = ranked(measured, metric)[0]
        lines.append(f"{title}: {best.cell.spec} ({headline(best.summary)})")
    if len(measured) > 1:
        lines.append(f"The speed of plain decoding varied between the cells by up to {noise(measured):.0%}.")
    num_different = sum(each.summary["identical"] < each.summary["questions"] for each in measured)
    if num_different:
        lines.append(
            f"In {num_different} of {len(measured)} cells, an answer differs from the one that plain decoding gives."
        )
    return lines


def headline(summary: dict[str, Any]) -> str:
    """The two most important numbers of a cell."""
    return f"acceptance length {number(summary['acceptance_length'])}, speed-up {number(summary['speedup'], unit='×')}"


def write(folder: Path, axes: Sequence[Axis], measured: Sequence[MeasuredCell], context: dict[str, Any]) -> None:
    """Write ``sweep.json`` and ``sweep.md``."""
    record = {
        "context": context,
        "axes": [asdict(axis) for axis in axes],
        "cells": [asdict(each.cell) | {"alone": each.base_speed, **each.summary} for each in measured],
    }
    lines = [*(f"- {line}" for line in conclusions(measured)), ""]
    for title, metric in RANKINGS.items():
        headings = [axis.name for axis in axes] + list(COLUMNS)
        rows = [headings, ["---"] * len(axes) + ["---:"] * len(COLUMNS), *_rows(ranked(measured, metric))]
        lines += [f"## By {title}", "", *("| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows), ""]
        lines += [f"![{title}]({metric}.png)", ""]
    lines += ["## What was run", "", *(f"- {key}: {safe_line(value)}" for key, value in context.items()), ""]
    write_text(folder / "sweep.json", json.dumps(record, indent=1) + "\n")
    write_text(folder / "sweep.md", "\n".join(lines))


def table(axes: Sequence[Axis], measured: Sequence[MeasuredCell]) -> Table:
    """The fastest cells, for the terminal."""
    fastest = ranked(measured, "speedup")[:MAX_CELLS_SHOWN]
    longest = ranked(fastest, "acceptance_length")[0]
    result = Table(
        title=f"the {len(fastest)} fastest cells; in bold, the longest acceptance among them",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in [*(axis.name.replace("_", "_\n", 1) for axis in axes), *COLUMNS]:
        result.add_column(heading.replace(" ", "\n", 1), justify="right" if heading in COLUMNS else "left")
    for each, row in zip(fastest, _rows(fastest), strict=True):
        row[: len(axes)] = map(short, each.cell.place)
        result.add_row(*row, style="bold" if each is longest else None)
    return result


def _rows(measured: Sequence[MeasuredCell]) -> list[list[str]]:
    return [[*each.cell.place, *(column(each.summary) for column in COLUMNS.values())] for each in measured]
