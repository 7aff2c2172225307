"""The page of one or several evaluations: tables, plots and answers in one self-contained HTML file."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import atomic_write, safe_text, write_text
from inference.reporting import plots
from inference.reporting.answer_viewer import Answers, Decode, choose_answers, cut_note, ended_turns
from inference.reporting.headline import headline
from inference.reporting.lengths import LENGTH_LEGEND, length_tables
from inference.reporting.rows import number
from inference.reporting.tables import (
    COUNTING_RULE,
    DRAFT_LEGEND,
    DRAFT_TOKENS,
    OVERVIEW,
    Summaries,
    draft_rows,
    drafter_rows,
    footnotes,
    legend,
    overview_rows,
    quality_rows,
    with_counting_rule,
)
from inference.results.conditions import CONDITIONS, LENGTH_CAP
from inference.results.folders import EvaluationResults, by_key
from inference.results.metrics import Summary

TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(
    folder: str | Path, summaries: Summaries, context: Mapping[str, Any], answers: Answers, decode: Decode
) -> Path:
    """Write the page of one evaluation.

    Args:
        folder: The folder to write to.
        summaries: The summaries, by benchmark and drafter.
        context: What was run: base, dtype, device, threads, date, command line, versions.
        answers: The recorded answers, by benchmark and drafter.
        decode: Turns token ids into text.
    """
    results = EvaluationResults(
        Path(folder).resolve().name,
        {"": dict(context)},
        {benchmark: dict(by_drafter) for benchmark, by_drafter in summaries.items()},
        {
            benchmark: {drafter: list(own) for drafter, own in by_drafter.items()}
            for benchmark, by_drafter in answers.items()
        },
    )
    return write_page(folder, [(results, decode)])


def write_page(folder: str | Path, evaluations: Sequence[tuple[EvaluationResults, Decode | None]]) -> Path:
    """Write ``report.html``, and its plots to the folder ``plots``.

    Args:
        folder: The folder to write to.
        evaluations: Evaluations with different conditions, each with the function that turns its token ids into text;
            without one, the steps of its answers are not shown.
    """
    from jinja2 import Environment

    folder = Path(folder)
    every = [results for results, _ in evaluations]
    colours = plots.choose_colours(
        summary for results in every for by_drafter in results.summaries.values() for summary in by_drafter.values()
    )
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_safe)
    environment.filters.update(number=number)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        parts=[
            _describe(results, decode, colours, folder / "plots", f"{index}-" if len(every) > 1 else "")
            for index, (results, decode) in enumerate(evaluations, 1)
        ],
        folders=[name for results in every for name in results.contexts],
        what_was_run=by_key(
            {name: with_counting_rule(context) for results in every for name, context in results.contexts.items()}
        ),
        colours=colours,
        counting_rule=COUNTING_RULE,
        overview_title=OVERVIEW,
        drafts_title=DRAFT_TOKENS,
        drafts_legend=DRAFT_LEGEND,
        length_legend=LENGTH_LEGEND,
    )
    path = folder / "report.html"
    write_text(path, page)
    return path


def _safe(value: Any) -> Any:
    return safe_text(value) if type(value) is str else value  # a string that is marked as HTML is ours


def _describe(
    results: EvaluationResults, decode: Decode | None, colours: plots.Colours, folder: Path, prefix: str
) -> dict[str, Any]:
    """The values that the template shows of one evaluation; draws its plots."""
    return {
        "name": results.name,
        "conditions": {key: value for key, value in results.context.items() if key in (*CONDITIONS, LENGTH_CAP)},
        "headline": headline(results.summaries),
        "overview": overview_rows(results.summaries) if len(results.summaries) > 1 else None,
        "left_out": context_lines(results, "left_out"),
        "warnings": context_lines(results, "warnings"),
        "benchmarks": [
            {
                "name": benchmark,
                "table": (rows := drafter_rows(by_drafter, {name: ended_turns(of) for name, of in answers.items()})),
                "legend": legend(*rows),
                "drafts": draft_rows(by_drafter),
                "lengths": length_tables(by_drafter),
                "quality": quality_rows(by_drafter),
                "cut": cut_note(by_drafter, answers, results.length_cap(benchmark)),
                "footnotes": footnotes(by_drafter),
                "figures": _draw_figures(folder, prefix + benchmark, dict(by_drafter), colours),
            }
            for benchmark, by_drafter in results.summaries.items()
            for answers in [results.answers.get(benchmark, {})]
        ],
        "shown": choose_answers(results.summaries, results.answers, decode),
        "is_coloured": decode is not None,
        "is_served": any(s.served for by_drafter in results.summaries.values() for s in by_drafter.values()),
    }


def context_lines(results: EvaluationResults, key: str) -> list[str]:
    """The lines of ``warnings`` or ``left_out``; if there are several folders, each line begins with its folder."""
    lines = []
    for name, context in results.contexts.items():
        value = context.get(key) or []
        folder = f"{name}: " if len(results.contexts) > 1 else ""
        lines += [folder + line for line in ([value] if isinstance(value, str) else value)]
    return lines


def _draw_figures(folder: Path, name: str, summaries: dict[str, Summary], colours: plots.Colours) -> list[dict]:
    """Draw every plot that has something to show: as a PNG file, and as data URIs for light and dark pages."""
    figures = []
    for plot in plots.applicable(summaries):
        pngs = plots.draw(plot, summaries, colours)
        with atomic_write(folder / f"{re.sub('[^A-Za-z0-9_.-]', '-', name)}-{plot}.png") as new:
            new.write_bytes(pngs["light"])
        sources = {theme: f"data:image/png;base64,{base64.b64encode(png).decode()}" for theme, png in pngs.items()}
        figures.append({"plot": plot, **sources})
    return figures
