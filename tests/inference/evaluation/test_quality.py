"""Recorded answers are scored by their first turns, without their reasoning."""

import pytest

from data.benchmarks import Question
from data.templates import ReasoningMarks
from inference.evaluation.quality import quality_of
from inference.results.records import Answer, Turn


def answer(number, *texts):
    turns = [Turn(text, [], 1, [], 1.0) for text in texts]
    return Answer(number, "math", "none", turns, [True] * len(turns))


def test_recorded_answers_are_scored_by_their_first_turn_in_the_order_of_the_questions():
    asked = [Question(index, "math", ("?",), f"#### {index + 1}") for index in range(2)]
    assert quality_of("gsm8k", asked, [answer(1, "2", "9"), answer(0, "1")]) == {"exact match": 100.0}
    with pytest.raises(ValueError, match="gsm8k: question 1 has no answer"):
        quality_of("gsm8k", asked, [answer(0, "1")])


def test_only_what_follows_the_reasoning_is_scored():
    def graded(text, is_open=False):
        marks = ReasoningMarks(("<think>", "</think>"), (5,), (8,), is_open)
        return quality_of("gsm8k", [Question(0, "math", ("?",), "#### 5")], [answer(0, text)], marks=marks)

    right, wrong = {"exact match": 100}, {"exact match": 0}
    assert graded("<think>Perhaps\n#### 4\n</think>\n\n#### 5") == right
    assert graded("Perhaps\n#### 4\n</think>\n\n#### 5", is_open=True) == right
    assert graded("<think>It is\n#### 5\n") == graded("It is\n#### 5\n", is_open=True) == wrong, "it has no end"
    assert graded("#### 5") == right
