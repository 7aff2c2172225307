"""The report's answers: which are shown, and their text cut where the steps of decoding ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from inference.reporting.tables import Summaries, fastest
from inference.results.metrics import Summary, acceptance_length
from inference.results.records import Answer, Turn

Answers = Mapping[str, Mapping[str, Sequence[Answer]]]  # by benchmark, by drafter
Decode = Callable[[list[int]], str]

MAX_SHOWN_OF_ONE = 12  # answers of a drafter
MAX_SHOWN_ANSWERS = 48  # of all drafters together, for the size of the page


@dataclass(frozen=True)
class StepSpan:
    """The text one step gained: what its accepted draft tokens gave, then what its bonus token gave."""

    accepted: str
    bonus: str
    num_accepted: int
    num_emitted: int


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


def choose_answers(summaries: Summaries, answers: Answers, decode: Decode | None) -> list[dict[str, Any]]:
    """Some answers of each drafter, the fastest drafter first; of the base alone only if nothing else ran.

    They come from as many benchmarks and categories as there is room for, from the same for all drafters.

    Args:
        summaries: By benchmark, by drafter.
        answers: The recorded answers, by benchmark, by drafter.
        decode: Turns token ids into text; without it the texts are shown whole.
    """
    drafters = list(dict.fromkeys(drafter for by_drafter in answers.values() for drafter in by_drafter))
    alone = {drafter for by in summaries.values() for drafter, summary in by.items() if summary.is_baseline}
    best = fastest(summaries)
    drafters = sorted([each for each in drafters if each not in alone] or drafters, key=lambda each: each != best)
    room = max(1, min(MAX_SHOWN_OF_ONE, MAX_SHOWN_ANSWERS // max(1, len(drafters))))
    chosen = []
    for drafter in drafters:
        given = _varied({benchmark: by_drafter.get(drafter, []) for benchmark, by_drafter in answers.items()})
        shown = [_shown(benchmark, answer, decode) for benchmark, answer in given[:room]]
        chosen.append({"drafter": drafter, "num_answers": len(given), "shown": shown})
    return chosen


def ended_turns(answers: Sequence[Answer]) -> str:
    """How many turns ended by themselves, of how many."""
    ended = [is_ended for answer in answers for is_ended in answer.ended]
    return f"{sum(ended)} of {len(ended)}" if ended else ""


def cut_note(by_drafter: Mapping[str, Summary], answers: Mapping[str, Sequence[Answer]], decoding: str) -> str:
    """A line where graded answers, first turns all, were cut at the length cap; nothing where all came to their end."""
    graded = [drafter for drafter, summary in by_drafter.items() if summary.quality]
    ended = [answer.ended[0] for drafter in graded for answer in answers.get(drafter, ())]
    if all(ended):
        return ""
    percent = 100 * ended.count(False) / len(ended)
    cap = f" ({decoding})" if decoding else ""
    return f"{percent:.3g} % of the graded answers were cut at the length cap{cap} and graded as far as they go."


def _shown(benchmark: str, answer: Answer, decode: Decode | None) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "answer": answer,
        "acceptance_length": acceptance_length(answer.turns),
        "turns": [
            {"turn": turn, "is_ended": is_ended, "spans": step_spans(turn, decode) if decode else None}
            for turn, is_ended in zip(answer.turns, answer.ended, strict=True)
        ],
    }


def _varied(answers: Mapping[str, Sequence[Answer]]) -> list[tuple[str, Answer]]:
    """A drafter's answers with their benchmarks: benchmarks take turns, and within each its categories."""
    by_benchmark = []
    for benchmark, own in answers.items():
        by_category: dict[str, list[tuple[str, Answer]]] = {}
        for answer in own:
            by_category.setdefault(answer.category, []).append((benchmark, answer))
        by_benchmark.append(_take_turns(by_category.values()))
    return _take_turns(by_benchmark)


def _common_length(text: str, whole: str) -> int:
    while not whole.startswith(text):
        text = text[:-1]
    return len(text)


def _take_turns(lists):
    """The first of each list, then the second of each, and so on."""
    return [item for rank in zip_longest(*lists) for item in rank if item is not None]
