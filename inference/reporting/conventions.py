"""Acceptance length and speed-up of recorded answers by every counting convention in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from data.files import escape_markdown
from inference.reporting.rows import Row, markdown_table, number, rich_table
from inference.results import intervals
from inference.results.answer_files import RecordedAnswer

Pairs = Sequence[tuple[RecordedAnswer, RecordedAnswer]]  # an answer, and the baseline's answer to the same question


def pair(answers: Sequence[RecordedAnswer], baseline: Sequence[RecordedAnswer]) -> Pairs:
    """Pair each answer with the baseline's answer to the same question.

    Raises:
        ValueError: The baseline did not answer a question, or with another number of turns.
    """
    by_id = {answer.question_id: answer for answer in baseline}
    for answer in answers:
        base = by_id.get(answer.question_id)
        if base is None:
            raise ValueError(
                f"{answer.place}: the baseline has no answer to question {answer.question_id}: "
                "pass answers to the same questions"
            )
        if len(base.turns) != len(answer.turns):
            raise ValueError(
                f"{answer.place}: {len(answer.turns)} turns, but {len(base.turns)} in {base.place}: "
                "pass answers to the same questions"
            )
    return [(answer, by_id[answer.question_id]) for answer in answers]


def acceptance_by_index(pairs: Pairs) -> float | None:
    """The CTC paper's beta (equation 12), which divides by the index of the last step: one step per turn is missing."""
    return _mean(_ratio(_tokens(answer), _indices(answer)) for answer, _ in pairs)


def acceptance_by_question(pairs: Pairs) -> float | None:
    """Mean over questions of the tokens per base forward of each."""
    return _mean(_ratio(*emitted_and_steps(answer)) for answer, _ in pairs)


def acceptance_micro(pairs: Pairs) -> float | None:
    """Tokens of all questions / base forwards of all questions."""
    counts = [emitted_and_steps(answer) for answer, _ in pairs]
    return _ratio(sum(emitted for emitted, _ in counts), sum(steps for _, steps in counts))


def speedup_by_question(pairs: Pairs) -> float | None:
    """The CTC paper's gamma (equation 13): the mean over questions of the speed-up of each."""
    return _mean(_ratio(_speed([answer]), _speed([base])) for answer, base in pairs)


def speedup_of_means(pairs: Pairs) -> float | None:
    """Mean over questions of the speed / the baseline's mean."""
    return _ratio(_mean(_speed([answer]) for answer, _ in pairs), _mean(_speed([base]) for _, base in pairs))


def speedup_micro(pairs: Pairs) -> float | None:
    """Speed over all questions together / the baseline's."""
    return _ratio(_speed([answer for answer, _ in pairs]), _speed([base for _, base in pairs]))


@dataclass(frozen=True)
class Convention:
    """One way to count acceptance length or speed-up.

    Args:
        name: What is counted, and who counts it like this.
        formula: How it is counted, in words.
        count: Computes the number; None if the files do not contain enough for it.
    """

    name: str
    formula: str
    count: Callable[[Pairs], float | None]


CONVENTIONS = (
    Convention(
        "beta, CTC paper",
        "mean over questions of new tokens / last step index, from 0 and summed over turns: a step per turn is missing",
        acceptance_by_index,
    ),
    Convention(
        "acceptance length, mean",
        "mean over questions of new tokens / steps; steps = that index + 1",
        acceptance_by_question,
    ),
    Convention(
        "acceptance length, micro",
        "all new tokens / all steps, prefills excluded; Spec-Bench's mean accepted tokens",
        acceptance_micro,
    ),
    Convention(
        "gamma, CTC paper",
        "mean over questions of tokens per second / the baseline's tokens per second",
        speedup_by_question,
    ),
    Convention(
        "speed-up, Spec-Bench", "mean over questions of tokens per second / the baseline's mean", speedup_of_means
    ),
    Convention("speed-up, micro", "(all tokens / all seconds) / the same ratio of the baseline", speedup_micro),
)


def identical_turns(pairs: Pairs) -> tuple[int, int]:
    """Number of turns with the baseline's text, and number of all turns."""
    turns = [both for answer, base in pairs for both in zip(answer.turns, base.turns, strict=True)]
    return sum(ours.text == its.text for ours, its in turns), len(turns)


def notes(pairs: Pairs) -> list[str]:
    """Return notes on the numbers: identical turns, the interval, estimated counts, unequal lengths."""
    num_identical, num_turns = identical_turns(pairs)
    lines = [f"identical turns: {num_identical} of {num_turns} ({100 * num_identical / num_turns:.1f} %)"]
    counts = [counted for answer, _ in pairs if all(counted := emitted_and_steps(answer))]
    if counts and (interval := intervals.interval([*zip(*counts, strict=True)], (1, -1))):
        low, high = interval
        lines.append(f"95 % interval of the micro acceptance length over questions: {low:.2f} to {high:.2f}")
    sides = dict(zip(("answers", "baseline"), zip(*pairs, strict=True), strict=True))
    for name, side in sides.items():
        if num_estimated := sum(turn.is_estimated for answer in side for turn in answer.turns):
            lines.append(
                f"the {name} record 0 new tokens in {num_estimated} of {num_turns} turns: idxs + 1 is counted there"
            )
    longest, its = (max(turn.num_tokens for answer in side for turn in answer.turns) for side in sides.values())
    if longest != its:
        lines.append(
            f"longest turn: {longest} tokens, the baseline's {its}: the speed-up is per token, not for the same work"
        )
    return lines


def emitted_and_steps(answer: RecordedAnswer) -> tuple[int, int]:
    """Number of tokens that steps emitted, and number of steps, prefills excluded; two zeros if it is not recorded.

    FastChat-style loops count the prefill's token as part of the first step, so their steps emit all tokens.
    """
    if answer.accept_lengths is not None:
        return sum(answer.accept_lengths), len(answer.accept_lengths)
    indices = _indices(answer)
    return (0, 0) if indices is None else (_tokens(answer), indices + len(answer.turns))


def _tokens(answer: RecordedAnswer) -> int:
    return sum(turn.num_tokens for turn in answer.turns)


def _indices(answer: RecordedAnswer) -> int | None:
    indices = [turn.index for turn in answer.turns if turn.index is not None]
    return sum(indices) if len(indices) == len(answer.turns) else None


def _speed(answers: Sequence[RecordedAnswer]) -> float | None:
    """Tokens per second."""
    turns = [turn for answer in answers for turn in answer.turns]
    seconds = [turn.seconds for turn in turns if turn.seconds is not None]
    return _ratio(sum(map(_tokens, answers)), sum(seconds)) if len(seconds) == len(turns) else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known."""
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def figures(pairs: Pairs) -> dict[str, Any]:
    """Every number by the name of its convention, and the notes."""
    return {convention.name: convention.count(pairs) for convention in CONVENTIONS} | {"notes": notes(pairs)}


def rows(pairs: Pairs) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each convention."""
    return ["figure", "value", "how it is counted"], [
        Row([convention.name, number(convention.count(pairs)), convention.formula]) for convention in CONVENTIONS
    ]


def category_rows(pairs: Pairs) -> tuple[list[str], list[Row]]:
    """Headings, and a row for each category that the files contain."""
    by_category: dict[str, list[tuple[RecordedAnswer, RecordedAnswer]]] = {}
    for answer, base in pairs:
        if answer.category is not None:
            by_category.setdefault(answer.category, []).append((answer, base))
    columns = {"acceptance length, micro": acceptance_micro, "speed-up, Spec-Bench": speedup_of_means}
    return ["category", "questions", *columns], [
        Row([category, str(len(own)), *(number(count(own)) for count in columns.values())])
        for category, own in by_category.items()
    ]


def table(pairs: Pairs) -> list[RenderableType]:
    """The tables and notes, for a rich console to print one after the other."""
    headings, convention_rows = rows(pairs)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if index == 1 else "left", no_wrap=index == 1)
    for row in convention_rows:
        grid.add_row(*map(Text, row.cells))
    by_category = category_rows(pairs)
    parts: list[RenderableType] = [rich_table(*by_category), Text()] if by_category[1] else []
    return [grid, Text(), *parts, *map(Text, notes(pairs)), Text()]


def markdown(pairs: Pairs) -> str:
    """The tables and notes in Markdown."""
    by_category = category_rows(pairs)
    lines = [*markdown_table(*rows(pairs)), *(markdown_table(*by_category) if by_category[1] else [])]
    return "\n".join([*lines, *(f"- {escape_markdown(note)}" for note in notes(pairs)), ""])
