"""Figures of draft tokens, of lengths and of reasoning, counted by hand."""

import pytest

from data.templates import ReasoningMarks
from inference.evaluate import intervals
from inference.evaluate.answers import Answer, Turn
from inference.evaluate.figures import acceptance_rates, count_drafts, length_ranges, reasoning
from inference.evaluate.intervals import Estimate
from inference.verifier.session import Step


def step(emitted, accepted, drafted=4, pending=1, scratch=0):
    return Step(emitted, accepted, pending, drafted, scratch, 0, (0.0,) * 5)


PREFILLS = [step(1, 0, 0, 30), step(2, 1, 4, 30), step(1, 0, 0, 9)]
QUESTIONS = [
    [[PREFILLS[0], step(3, 2), step(1, 0), step(5, 4)], [PREFILLS[1], step(2, 1, scratch=3)]],
    [[PREFILLS[2], step(1, 0, drafted=0), step(3, 2)]],
]


def test_the_figures_of_each_convention():
    counts = count_drafts([turn for turns in QUESTIONS for turn in turns])
    assert (counts.prefills, counts.prefill_tokens, counts.steps, counts.drafting_steps) == (3, 4, 6, 5)
    assert (counts.emitted, counts.accepted, counts.drafted, counts.fed) == (15, 9, 20, 6 + 20 + 3)
    assert counts.figures() == {
        "fed_per_step": 29 / 6,
        "draft_efficiency": 9 / 20,
        "accepted_per_step": 9 / 6,
        "fed_per_token": 29 / 15,
        "wasted_per_token": (20 + 3 - 9) / 15,
        "conventions": {
            "acceptance length (drafters, Spec-Bench)": 15 / 6,
            "block efficiency (Ouroboros)": 19 / 9,
            "accept length (SGLang)": 19 / 6,
            "mean acceptance length (vLLM)": 1 + 9 / 5,  # a step without drafts does not count
        },
    }


def test_acceptance_rates_by_position_with_intervals_over_the_questions():
    rates = acceptance_rates([[each for turn in turns for each in turn[1:]] for turns in QUESTIONS])
    assert [rate.rate.value for rate in rates] == pytest.approx([4 / 6, 3 / 6, 1 / 6, 1 / 6])
    assert [rate.conditional.value for rate in rates] == pytest.approx([4 / 6, 3 / 4, 1 / 3, 1])
    assert rates[0].rate.interval == rates[0].conditional.interval == intervals.interval([[3, 1], [4, 2]], (1, -1))
    assert rates[1].conditional.interval == intervals.interval([[2, 1], [3, 1]], (1, -1))
    assert 1 + sum(rate.rate.value for rate in rates) == pytest.approx(15 / 6), "the rates add up to what is accepted"


def test_a_drafter_that_drafts_nothing_has_no_rates():
    turn = [PREFILLS[0], step(1, 0, 0), step(1, 0, 0)]
    found = count_drafts([turn]).figures()
    assert (acceptance_rates([turn[1:]]), found["fed_per_token"], found["wasted_per_token"]) == ([], 1, 0)
    assert "mean acceptance length (vLLM)" not in found["conventions"]


# ---- lengths


def timed(prompt_tokens, emitted, seconds):
    """A turn whose steps emit so many tokens and take so many seconds each; the first is the prefill."""
    costs = [Step(e, e - 1, 1, 4, 0, 0, (s, 0, 0, 0, 0)) for e, s in zip(emitted, seconds, strict=True)]
    return Turn("", list(range(sum(emitted))), prompt_tokens, costs, sum(seconds), True)


LONG = [
    # The steps after the prefill begin at 251, 254 and 257 tokens, those of the second turn at 601.
    Answer(1, "a", "ctc", [timed(250, [1, 3, 3, 2], [9.0, 0.1, 0.2, 0.3]), timed(600, [1, 4], [8.0, 0.4])]),
    Answer(2, "a", "ctc", [timed(255, [1, 1], [7.0, 0.6]), timed(256, [1], [5.0])]),
]


def test_a_step_counts_where_its_text_ends():
    ranges = length_ranges(LONG)
    found = [(own.start, own.end, own.steps, own.acceptance.value) for own in ranges]
    assert found == [(0, 256, 2, 3.0), (256, 512, 2, 1.5), (512, 1024, 1, 4.0)]
    assert [own.step_seconds for own in ranges] == pytest.approx([0.15, 0.45, 0.4])
    assert ranges[0].acceptance.interval is None, "one question has no interval"
    low, high = ranges[1].acceptance.interval
    assert 1 <= low < 1.5 < high <= 2


# ---- reasoning

MARKS = ReasoningMarks(("<think>", "</think>"), (5,), (8,), False)


def thinking(tokens, emitted):
    """A turn whose steps emit so many tokens each; the first is the prefill."""
    assert sum(emitted) == len(tokens)
    return Turn("", tokens, 9, [Step(e, e - 1, 1, 4, 0, 0, (0.1,) * 5) for e in emitted], 1.0, True)


THOUGHTS = [
    # Reasoning at positions 0 to 3. Of the steps behind the prefill those at 1 and 3 begin inside, that at 5 does not.
    Answer(1, "a", "ctc", [thinking([5, 1, 1, 8, 3, 3, 3, 2], [1, 2, 2, 3])]),
    Answer(2, "a", "ctc", [thinking([3, 3, 3], [1, 2]), thinking([5, 1, 1, 1], [1, 3])]),
]


def test_a_step_belongs_to_the_part_of_its_first_token():
    found = reasoning(THOUGHTS, MARKS)
    assert found.turns == 2, "the turn without marks is in neither part"
    assert (found.inside_steps, found.inside.value) == (3, pytest.approx(7 / 3))
    assert (found.outside_steps, found.outside) == (1, Estimate(3.0, None))
    low, high = found.inside.interval
    assert 2 <= low < 7 / 3 < high <= 3


def test_there_are_no_figures_without_marks():
    assert reasoning(THOUGHTS, None) is None
    assert reasoning(THOUGHTS, ReasoningMarks(("a", "b"), (11,), (12,), False)) is None
