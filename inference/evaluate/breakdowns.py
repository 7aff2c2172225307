"""What becomes of draft tokens, step by step: by position, by length of the text, and in reasoning."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from data.templates import ReasoningMarks
from inference.evaluate.answers import Answer, Turn
from inference.evaluate.intervals import Count, Estimate, Figure, quotient, ratio
from inference.evaluate.step_times import own_times
from inference.verifier.session import Step

SHORTEST = 256  # tokens; each further range of lengths begins at twice the length

Timed = tuple[Step, float]  # a step and its seconds


@dataclass(frozen=True)
class DraftCounts:
    """Sums over the steps of some turns, from which every convention computes its figures; see docs/figures.md."""

    prefills: int  # one for each turn
    prefill_tokens: int  # that the prefills emitted
    steps: int  # all others
    drafting_steps: int  # those that fed draft tokens that could be accepted
    emitted: int  # tokens that the steps emitted, bonus tokens included
    accepted: int  # draft tokens that they accepted
    drafted: int  # draft tokens that they fed and could have accepted
    fed: int  # all tokens that they fed to the base

    def figures(self) -> dict[str, Any]:
        """The fields of an `Acceptance` that follow from these sums."""
        return {
            "fed_per_step": quotient(self.fed, self.steps),
            "hit_ratio": quotient(self.accepted, self.drafted),
            "accepted_per_step": quotient(self.accepted, self.steps),
            "fed_per_token": quotient(self.fed, self.emitted),
            "wasted_per_token": quotient(self.fed - self.steps - self.accepted, self.emitted),
            "conventions": self.by_convention(),
        }

    def by_convention(self) -> dict[str, float]:
        """The acceptance length as each tool counts it, by the tool's name for it; without those that are unknown.

        Ours excludes the prefills; Ouroboros counts them and the tokens that they emit; SGLang counts these tokens, but
        not the prefills as steps; vLLM counts only steps with drafts, and adds 1 for the bonus token.
        """
        every = self.emitted + self.prefill_tokens
        figures = {
            "acceptance length (drafters, Spec-Bench)": (self.emitted, self.steps),
            "block efficiency (Ouroboros)": (every, self.steps + self.prefills),
            "accept length (SGLang)": (every, self.steps),
        }
        found = {name: tokens / count for name, (tokens, count) in figures.items() if count}
        if self.drafting_steps:
            found["mean acceptance length (vLLM)"] = 1 + self.accepted / self.drafting_steps
        return found


def count_drafts(turns: Sequence[Sequence[Step]]) -> DraftCounts:
    """Add up the steps of turns, the first of each being the prefill."""
    prefills = [steps[0] for steps in turns if steps]
    steps = [step for turn in turns for step in turn[1:]]
    return DraftCounts(
        prefills=len(prefills),
        prefill_tokens=sum(step.emitted for step in prefills),
        steps=len(steps),
        drafting_steps=sum(step.fed_candidates > 0 for step in steps),
        emitted=sum(step.emitted for step in steps),
        accepted=sum(step.accepted for step in steps),
        drafted=sum(step.fed_candidates for step in steps),
        fed=sum(step.fed for step in steps),
    )


@dataclass(frozen=True)
class PositionRate:
    """How often draft tokens of one position are accepted; position 1 is the first after the root."""

    rate: Estimate  # share of all steps that accept a draft token at the position (unconditional)
    conditional: Estimate  # share of the steps that accepted the position before


def acceptance_rates(questions: Sequence[Sequence[Step]]) -> list[PositionRate]:
    """The acceptance rate of each draft position, up to the last that any step of the questions ever accepted."""
    deepest = max((step.accepted for steps in questions for step in steps), default=0)
    reached = [[len(steps) for steps in questions]]
    reached += [[sum(step.accepted >= d for step in steps) for steps in questions] for d in range(1, deepest + 1)]
    return [
        PositionRate(*(ratio(zip(reached[position], of, strict=True)) for of in (reached[0], reached[position - 1])))
        for position in range(1, deepest + 1)
    ]


# ---- by length of the text


@dataclass(frozen=True)
class LengthRange:
    """The steps at texts whose numbers of tokens are in one range."""

    start: Count
    end: Count  # the smallest length beyond the range
    steps: Count
    acceptance: Estimate  # acceptance length of the steps
    step_seconds: Figure  # median time of a step, see `own_times`


def length_ranges(answers: Sequence[Answer]) -> list[LengthRange]:
    """The steps by the position after the root when they begin; ranges without any are left out."""
    groups: dict[int, dict[int, list[Timed]]] = {}  # the steps of each question, by range
    for question, answer in enumerate(answers):
        for turn in (turn for turn in answer.turns if turn.steps):
            (prefill, _), *steps = own_times(turn)
            length = turn.prompt_tokens + prefill.emitted
            for step, seconds in steps:
                groups.setdefault(range_start(length), {}).setdefault(question, []).append((step, seconds))
                length += step.emitted
    ranges = []
    for start, by_question in sorted(groups.items()):
        times = [own for steps in by_question.values() for _, own in steps]
        counts = [(sum(step.emitted for step, _ in own), len(own)) for own in by_question.values()]
        ranges.append(LengthRange(start, max(SHORTEST, 2 * start), len(times), ratio(counts), median(times)))
    return ranges


def range_start(length: int) -> int:
    """The smallest length of the range that a length is in: 0, 256, 512, 1,024, ...

    >>> [range_start(length) for length in (255, 256, 511, 5000)]
    [0, 256, 256, 4096]
    """
    return 0 if length < SHORTEST else 1 << (length.bit_length() - 1)


# ---- in reasoning


@dataclass(frozen=True)
class Reasoning:
    """What was accepted in the turns with reasoning; a step belongs to the part of its first emitted token."""

    turns: Count  # with reasoning; the others are in neither part
    inside_steps: Count  # in the reasoning, its marks included
    inside: Estimate  # acceptance length of these steps
    outside_steps: Count  # before and after it
    outside: Estimate


def reasoning(answers: Sequence[Answer], marks: ReasoningMarks | None) -> Reasoning | None:
    """Acceptance apart for the reasoning and for the rest of the answers; None if no turn has reasoning."""
    parts: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # emitted tokens and steps of each question
    num_turns = 0
    for answer in answers if marks else ():
        spans = [(turn, span) for turn in answer.turns if marks and (span := marks.span(turn.token_ids))]
        num_turns += len(spans)
        counted = [each for turn, span in spans for each in _sides(turn, span)]
        for is_inside, part in parts.items():
            emitted = [number for side, number in counted if side == is_inside]
            part += [(sum(emitted), len(emitted))] if emitted else []
    if not num_turns:
        return None
    steps = {side: sum(count for _, count in part) for side, part in parts.items()}
    return Reasoning(num_turns, steps[True], ratio(parts[True]), steps[False], ratio(parts[False]))


def _sides(turn: Turn, span: tuple[int, int]) -> list[tuple[bool, int]]:
    """Of each step whether it begins inside of the span, and how many tokens it emits."""
    position, sides = turn.steps[0].emitted if turn.steps else 0, []
    for step in turn.steps[1:]:
        sides.append((span[0] <= position < span[1], step.emitted))
        position += step.emitted
    return sides
