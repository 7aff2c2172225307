"""Acceptance length and step time by position in the context and by length of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from inference.results.draft_figures import GroupAcceptance, group_acceptance
from inference.results.records import Answer
from inference.results.step_times import own_times
from inference.verifier.session import StepCost

SHORTEST = 256  # tokens; each further range begins at twice the length

Timed = tuple[StepCost, float]  # a step and its seconds


@dataclass(frozen=True)
class LengthRange(GroupAcceptance):
    """The steps at texts, or after prompts, whose numbers of tokens are in one range.

    Args:
        start: Smallest length of the range, in tokens.
        end: Smallest length beyond the range.
    """

    start: int
    end: int


@dataclass(frozen=True)
class LengthFigures:
    """Acceptance length by length; ranges without any turn are left out.

    Args:
        by_position: By the number of tokens of the text when the step begins, which is the position after the root.
        by_prompt: By the number of tokens of the turn's prompt, the earlier turns included.
    """

    by_position: list[LengthRange]
    by_prompt: list[LengthRange]


@dataclass(frozen=True)
class LengthSeconds:
    """Median times in the ranges of `LengthFigures`, in their order; None without steps.

    The time of a step is its wall time, or the CPU time of the decoding thread if that is smaller.

    Args:
        by_position: Seconds of a step.
        by_prompt: Seconds of a step.
        prefill: Seconds of a prefill, for each range of prompts.
    """

    by_position: list[float | None]
    by_prompt: list[float | None]
    prefill: list[float]


def length_figures(answers: Sequence[Answer]) -> tuple[LengthFigures, LengthSeconds]:
    """Compute the figures of a drafter's answers, and the times that belong to them."""
    positions: dict[int, dict[int, list[Timed]]] = {}  # the steps of each question, by range
    prompts: dict[int, dict[int, list[Timed]]] = {}
    prefills: dict[int, list[float]] = {}
    for question, answer in enumerate(answers):
        for turn in (turn for turn in answer.turns if turn.steps):
            (prefill, prefill_seconds), *steps = own_times(turn)
            prompt = range_start(turn.prompt_tokens)
            prefills.setdefault(prompt, []).append(prefill_seconds)
            prompts.setdefault(prompt, {}).setdefault(question, []).extend(steps)
            length = turn.prompt_tokens + prefill.emitted
            for step, seconds in steps:
                positions.setdefault(range_start(length), {}).setdefault(question, []).append((step, seconds))
                length += step.emitted
    figures = LengthFigures(_ranges(positions), _ranges(prompts))
    return figures, LengthSeconds(
        _medians(positions), _medians(prompts), [median(prefills[start]) for start in sorted(prefills)]
    )


def range_start(length: int) -> int:
    """The smallest length of the range that a length is in: 0, 256, 512, 1,024, ...

    Of 255 tokens it is 0, of 256 and of 511 it is 256, and of 5,000 it is 4,096.
    """
    return 0 if length < SHORTEST else 1 << (length.bit_length() - 1)


def _ranges(groups: Mapping[int, Mapping[int, Sequence[Timed]]]) -> list[LengthRange]:
    ranges = []
    for start, by_question in sorted(groups.items()):
        counts = ((sum(step.emitted for step, _ in steps), len(steps)) for steps in by_question.values())
        ranges.append(LengthRange(**asdict(group_acceptance(counts)), start=start, end=max(SHORTEST, 2 * start)))
    return ranges


def _medians(groups: Mapping[int, Mapping[int, Sequence[Timed]]]) -> list[float | None]:
    seconds = ([own for steps in groups[start].values() for _, own in steps] for start in sorted(groups))
    return [median(own) if own else None for own in seconds]
