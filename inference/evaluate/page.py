"""The page of one or several evaluations: tables, plots and answers in one self-contained HTML file."""

import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.files import atomic_write, delete_stale, write_text
from data.safe_text import safe_text
from data.templates import decode_answer
from data.tokenizer import load_tokenizer
from drafters.tree import common_prefix
from inference.evaluate import plots, tables
from inference.evaluate.answers import Answer, Turn, turns_of
from inference.evaluate.conditions import describe
from inference.evaluate.figures import acceptance_length
from inference.evaluate.results import EvaluationResults

Decode = Callable[[list[int]], str]  # turns token ids into text

TEMPLATE = Path(__file__).with_name("page.html.j2")
MAX_ANSWERS_PER_DRAFTER = 12
MAX_DIVIDED = 8192  # tokens of a turn whose steps are shown: the time to find them grows with their square
MAX_ANSWERS = 48  # of all drafters together, which limits the size of the page


def write_page(
    path: Path, parts: Sequence[tuple[EvaluationResults, Decode | None]], plots_folder: Path | None = None
) -> None:
    """Write the page of some evaluations.

    Each comes with the function that turns its token ids into text; without one, the steps of its answers are not
    shown. The folder gets the plots as PNG files too, in place of those of an earlier page.
    """
    from jinja2 import Environment

    def finalize(value: Any) -> Any:
        return safe_text(value) if type(value) is str else value  # a string that is marked as HTML is ours

    evaluations, images = [results for results, _ in parts], dict[str, bytes]()
    summaries = [s for results in evaluations for by_drafter in results.summaries.values() for s in by_drafter.values()]
    colours = plots.choose_colours(summaries)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=finalize)
    environment.filters.update(number=tables.number)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        parts=[_describe(results, decode, colours, images) for results, decode in parts],
        overview=tables.evaluations_table(evaluations) if len(evaluations) > 1 else None,
        runs={results.name: describe(results.conditions, results.record) for results in evaluations},
        colours=colours,
        counting_rule=tables.COUNTING_RULE,
    )
    write_text(path, page)
    if plots_folder:
        for name, png in images.items():
            with atomic_write(plots_folder / name) as new:
                new.write_bytes(png)
        delete_stale(plots_folder, images)


def find_decoder(results: EvaluationResults, tokenizer: str | None = None) -> Decode | None:
    """Return the function that turns the token ids of an evaluation into text; None if no tokenizer reproduces it.

    ``tokenizer`` is a tokenizer's folder, by default that of the base. Raises ValueError if it is given and cannot be
    loaded.
    """
    try:
        reader = load_tokenizer(tokenizer or results.conditions.base)
    except ValueError:
        if tokenizer:
            raise
        return None
    first_answers = [answers[0] for by_drafter in results.answers.values() for answers in by_drafter.values()]
    fits = all(decode_answer(turn.token_ids, reader).strip() == turn.text for turn in turns_of(first_answers))
    decode: Any = reader.decode
    return decode if fits else None


def _describe(
    results: EvaluationResults, decode: Decode | None, colours: plots.Colours, images: dict[str, bytes]
) -> dict[str, Any]:
    """The values that the template shows of one evaluation; its plots are also put under the names of their files."""
    benchmarks = []
    for benchmark, by_drafter in results.summaries.items():
        sources = {}
        for plot, png in plots.draw_all(by_drafter, colours).items():
            images[f"{re.sub('[^A-Za-z0-9_.-]', '-', benchmark)}-{plot}.png"] = png
            sources[plot] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        shown, notes = tables.benchmark_tables(by_drafter), tables.footnotes(by_drafter)
        benchmarks.append({"name": benchmark, "tables": shown, "notes": notes, "figures": sources})
    turns = [t for by in results.answers.values() for answers in by.values() for a in answers for t in a.turns]
    return {
        "name": results.name,
        "conditions": {"base": results.conditions.base, **results.conditions.same()},
        "headline": tables.headline(results),
        "left_out": results.record.left_out,
        "warnings": results.record.warnings,
        "benchmarks": benchmarks,
        "drafters": choose_answers(results, decode),
        "is_coloured": decode is not None,
        "has_steps": any(turn.steps for turn in turns),
    }


# ---- answers


class StepSpan(NamedTuple):
    """The text that one step emitted: that of its accepted draft tokens, then that of its bonus token."""

    accepted: str
    bonus: str
    num_accepted: int
    num_emitted: int


def step_spans(turn: Turn, decode: Decode) -> list[StepSpan]:
    """Divide the text of a turn into its steps; joined, they are the full text.

    A boundary inside a character of several tokens moves back to the beginning of the character.
    """
    text = decode(turn.token_ids)
    spans: list[StepSpan] = []
    num_tokens = start = 0
    for index, step in enumerate(turn.steps):
        tokens_at = (num_tokens + step.accepted, num_tokens + step.emitted)
        middle, end = (max(start, common_prefix(decode(turn.token_ids[:at]), text, start)) for at in tokens_at)
        if index == len(turn.steps) - 1:
            end = len(text)
        if step.emitted == step.accepted:  # a text that is cut at the length cap may end without a bonus token
            middle = end
        spans.append(StepSpan(text[start:middle], text[middle:end], step.accepted, step.emitted))
        num_tokens, start = tokens_at[1], end
    return spans


def choose_answers(results: EvaluationResults, decode: Decode | None) -> list[dict[str, Any]]:
    """Choose some answers of each drafter, the fastest drafter first; of the base alone only if nothing else was run.

    They are spaced evenly over all benchmarks, and answer the same questions for all drafters.
    """
    drafters = list(dict.fromkeys(drafter for by_drafter in results.answers.values() for drafter in by_drafter))
    baselines = {name for by in results.summaries.values() for name, summary in by.items() if summary.is_baseline}
    first = tables.fastest(results)
    drafters = sorted([name for name in drafters if name not in baselines] or drafters, key=lambda name: name != first)
    count = max(1, min(MAX_ANSWERS_PER_DRAFTER, MAX_ANSWERS // max(1, len(drafters))))
    chosen = []
    for drafter in drafters:
        pairs = [(name, answer) for name, by in results.answers.items() for answer in by.get(drafter, [])]
        answers = [_describe_answer(*pair, decode) for pair in pairs[:: max(1, -(-len(pairs) // count))]]
        chosen.append({"drafter": drafter, "num_answers": len(pairs), "answers": answers})
    return chosen


def _describe_answer(benchmark: str, answer: Answer, decode: Decode | None) -> dict[str, Any]:
    turns = []
    for turn in answer.turns:
        is_divided = decode and turn.steps and len(turn.token_ids) <= MAX_DIVIDED
        turns.append({"turn": turn, "spans": step_spans(turn, decode) if decode and is_divided else None})
    return {"benchmark": benchmark, "answer": answer, "acceptance": acceptance_length(answer.turns), "turns": turns}
