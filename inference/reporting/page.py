"""The page of an evaluation: tables, plots and answers in one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.reporting import plots
from inference.reporting.answer_viewer import Answers, Decode, choose_answers, cut_note, ended_turns
from inference.reporting.tables import (
    COUNTING_RULE,
    OVERVIEW,
    Summaries,
    counted,
    drafter_rows,
    footnotes,
    headline,
    legend,
    number,
    overview_rows,
    quality_rows,
)
from inference.results.folders import Run, by_key
from inference.results.metrics import Summary

TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(
    folder: str | Path, summaries: Summaries, context: Mapping[str, Any], answers: Answers, decode: Decode
) -> Path:
    """Write the page of one evaluation.

    Args:
        folder: Where to write.
        summaries: By benchmark, by drafter.
        context: What was run: base, dtype, device, threads, date, command line, versions.
        answers: The recorded answers, by benchmark, by drafter.
        decode: Turns token ids into text.
    """
    run = Run(Path(folder).resolve().name, {"": dict(context)}, dict(summaries), dict(answers))
    return write_page(folder, [(run, decode)])


def write_page(folder: str | Path, runs: Sequence[tuple[Run, Decode | None]]) -> Path:
    """Write ``report.html``, and its plots to ``plots/`` as well.

    Args:
        folder: Where to write.
        runs: What was measured, under other conditions each; and what turns its token ids into text, if anything does.
    """
    from jinja2 import Environment

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    colours = plots.choose_colours(s for run, _ in runs for by in run.summaries.values() for s in by.values())
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        parts=[
            _describe(run, decode, colours, folder / "plots", f"{index}-" if len(runs) > 1 else "")
            for index, (run, decode) in enumerate(runs, 1)
        ],
        folders=[name for run, _ in runs for name in run.contexts],
        what_was_run=by_key({name: counted(told) for run, _ in runs for name, told in run.contexts.items()}),
        colours=colours,
        counting_rule=COUNTING_RULE,
        overview_title=OVERVIEW,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _describe(run: Run, decode: Decode | None, colours: plots.Colours, folder: Path, prefix: str) -> dict[str, Any]:
    """What the page tells of one run."""
    return {
        "name": run.name,
        "conditions": run.conditions,
        "headline": headline(run.summaries),
        "overview": overview_rows(run.summaries) if len(run.summaries) > 1 else None,
        "left_out": said(run, "left_out"),
        "warnings": said(run, "warnings"),
        "benchmarks": [
            {
                "name": benchmark,
                "table": (rows := drafter_rows(by_drafter, {name: ended_turns(of) for name, of in answers.items()})),
                "legend": legend(*rows),
                "quality": quality_rows(by_drafter),
                "cut": cut_note(by_drafter, answers, run.conditions.get("decoding", "")),
                "footnotes": footnotes(by_drafter),
                "figures": _draw_figures(folder, prefix + benchmark, dict(by_drafter), colours),
            }
            for benchmark, by_drafter in run.summaries.items()
            for answers in [run.answers.get(benchmark, {})]
        ],
        "shown": choose_answers(run.summaries, run.answers, decode),
        "is_coloured": decode is not None,
    }


def said(run: Run, key: str) -> list[str]:
    """What an evaluation said of ``warnings`` or of ``left_out``, with the folder's name where there are several."""
    found = []
    for name, context in run.contexts.items():
        told = context.get(key) or []
        folder = f"{name}: " if len(run.contexts) > 1 else ""
        found += [folder + line for line in ([told] if isinstance(told, str) else told)]
    return found


def _draw_figures(folder: Path, name: str, summaries: dict[str, Summary], colours: plots.Colours) -> list[dict]:
    """Every plot that has something to show: written as a PNG, and embedded for light and dark pages."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    for plot in plots.applicable(summaries):
        pngs = {theme: plots.draw(plot, summaries, colours, theme) for theme in plots.THEMES}
        (folder / f"{re.sub('[^A-Za-z0-9_.-]', '-', name)}-{plot}.png").write_bytes(pngs["light"])
        sources = {theme: f"data:image/png;base64,{base64.b64encode(png).decode()}" for theme, png in pngs.items()}
        figures.append({"plot": plot, **sources})
    return figures
