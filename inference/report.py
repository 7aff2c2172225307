"""What an evaluation leaves behind: results.json and report.html, one page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment

from inference import plots
from inference.metrics import Summary, acceptance_length
from inference.record import Answer, Turn
from inference.tables import (
    COLUMNS,
    COUNTING_RULE,
    Summaries,
    counted,
    drafter_rows,
    footnotes,
    headline,
    markdown,
    number,
    table,
)

__all__ = ["StepSpan", "markdown", "step_spans", "table", "write_report", "write_results"]

Answers = Mapping[str, Mapping[str, Sequence[Answer]]]  # by benchmark, by drafter
Decode = Callable[[list[int]], str]

TEMPLATE = Path(__file__).with_name("report.html.j2")
MAX_SHOWN_ANSWERS = 12


@dataclass(frozen=True)
class StepSpan:
    """The text one step gained: what its accepted draft tokens gave, then what its bonus token gave."""

    accepted: str
    bonus: str
    num_accepted: int
    num_emitted: int


def write_results(folder: str | Path, summaries: Summaries, context: Mapping[str, Any]) -> Path:
    """Write every number to ``results.json``."""
    path = Path(folder) / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {benchmark: {name: asdict(s) for name, s in by.items()} for benchmark, by in summaries.items()}
    record = {"context": counted(context), "results": results}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    return path


def write_report(
    folder: str | Path, summaries: Summaries, context: Mapping[str, Any], answers: Answers, decode: Decode
) -> Path:
    """Write ``report.html``, and its plots to ``plots/`` as well.

    Args:
        folder: Where to write.
        summaries: By benchmark, by drafter.
        context: What was run: base, dtype, device, threads, date, command line, versions.
        answers: The recorded answers, by benchmark, by drafter.
        decode: Turns token ids into text.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    colours = plots.choose_colours(s for by_drafter in summaries.values() for s in by_drafter.values())
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        headline=headline(summaries),
        columns=[heading for heading, _ in COLUMNS],
        benchmarks=[
            {
                "name": benchmark,
                "rows": drafter_rows(by_drafter),
                "footnotes": footnotes(by_drafter),
                "figures": _draw_figures(folder / "plots", benchmark, dict(by_drafter), colours),
            }
            for benchmark, by_drafter in summaries.items()
        ],
        colours=colours,
        shown=_choose_answers(summaries, answers, decode),
        context=counted(context),
        counting_rule=COUNTING_RULE,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def step_spans(turn: Turn, decode: Decode) -> list[StepSpan]:
    """The turn's text, cut where its steps ended; the pieces together are the whole text.

    A cut inside a character of several tokens moves back to where the character begins.
    """
    whole = decode(turn.token_ids)
    spans: list[StepSpan] = []
    num_tokens = start = 0
    for index, step in enumerate(turn.steps):
        tokens_at = (num_tokens + step.accepted, num_tokens + step.emitted)
        middle, end = (max(start, _common_length(decode(turn.token_ids[:at]), whole)) for at in tokens_at)
        if index == len(turn.steps) - 1:
            end = len(whole)
        if step.emitted == step.accepted:  # a cut text may end without a bonus token
            middle = end
        spans.append(StepSpan(whole[start:middle], whole[middle:end], step.accepted, step.emitted))
        num_tokens, start = tokens_at[1], end
    return spans


def _common_length(text: str, whole: str) -> int:
    while not whole.startswith(text):
        text = text[:-1]
    return len(text)


def _draw_figures(folder: Path, benchmark: str, summaries: dict[str, Summary], colours: plots.Colours) -> list[dict]:
    """Every plot of a benchmark: written as a PNG, and embedded for light and dark pages."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    for plot in plots.PLOTS:
        pngs = {theme: plots.draw(plot, summaries, colours, theme) for theme in plots.THEMES}
        (folder / f"{re.sub('[^A-Za-z0-9_.-]', '-', benchmark)}-{plot}.png").write_bytes(pngs["light"])
        sources = {theme: f"data:image/png;base64,{base64.b64encode(png).decode()}" for theme, png in pngs.items()}
        figures.append({"plot": plot, **sources})
    return figures


def _choose_answers(summaries: Summaries, answers: Answers, decode: Decode) -> list[dict[str, Any]]:
    """Answers of each benchmark's fastest drafter, from as many benchmarks and categories as there is room for."""
    by_benchmark = []
    for benchmark, by_drafter in answers.items():
        measured = list(summaries[benchmark].values())
        best = max([s for s in measured if not s.is_baseline] or measured, key=lambda summary: summary.speedup or 0.0)
        by_category: dict[str, list[tuple[str, Answer]]] = {}
        for answer in by_drafter[best.drafter]:
            by_category.setdefault(answer.category, []).append((benchmark, answer))
        by_benchmark.append(_take_turns(by_category.values()))
    return [
        {
            "benchmark": benchmark,
            "answer": answer,
            "acceptance_length": acceptance_length(answer.turns),
            "turns": [
                {"turn": turn, "is_ended": is_ended, "spans": step_spans(turn, decode)}
                for turn, is_ended in zip(answer.turns, answer.ended, strict=True)
            ],
        }
        for benchmark, answer in _take_turns(by_benchmark)[:MAX_SHOWN_ANSWERS]
    ]


def _take_turns(lists):
    """The first of each list, then the second of each, and so on."""
    return [item for rank in zip_longest(*lists) for item in rank if item is not None]
