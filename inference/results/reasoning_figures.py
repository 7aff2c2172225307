"""Acceptance apart for the reasoning and for the rest of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.templates import ReasoningMarks
from inference.results.draft_figures import GroupAcceptance, group_acceptance
from inference.results.records import Answer, Turn


@dataclass(frozen=True)
class ReasoningFigures:
    """What was accepted in the turns with reasoning; the others are in neither part.

    A step belongs to the part of its first emitted token.

    Args:
        turns: Number of turns with reasoning.
        reasoning: The reasoning, its marks included.
        answer: What comes before and after it.
    """

    turns: int
    reasoning: GroupAcceptance
    answer: GroupAcceptance


def reasoning_figures(answers: Sequence[Answer], marks: ReasoningMarks | None) -> ReasoningFigures | None:
    """Compute the figures; None if no turn has reasoning."""
    spans = [[(turn, marks.span(turn.token_ids)) for turn in answer.turns] for answer in answers] if marks else []
    inside: list[tuple[int, int]] = []  # of each question the emitted tokens and the steps
    outside: list[tuple[int, int]] = []
    num_turns = 0
    for turns in spans:
        counted = [_count(turn, span) for turn, span in turns if span]
        num_turns += len(counted)
        for part, own in zip((inside, outside), zip(*counted, strict=True), strict=False):
            part.append((sum(emitted for emitted, _ in own), sum(steps for _, steps in own)))
    return ReasoningFigures(num_turns, group_acceptance(inside), group_acceptance(outside)) if num_turns else None


def _count(turn: Turn, span: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Emitted tokens and steps, inside of the span and outside."""
    counts = {True: [0, 0], False: [0, 0]}
    position = turn.steps[0].emitted if turn.steps else 0
    for step in turn.steps[1:]:
        count = counts[span[0] <= position < span[1]]
        count[0] += step.emitted
        count[1] += 1
        position += step.emitted
    return (counts[True][0], counts[True][1]), (counts[False][0], counts[False][1])
