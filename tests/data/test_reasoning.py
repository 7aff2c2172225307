"""Reasoning in answers, found by the marks of a chat template."""

import pytest

from data.reasoning import ReasoningMarks, find_marks


@pytest.mark.parametrize(
    ("answer", "is_open", "span"),
    [
        ([7, 5, 1, 2, 8, 3], False, (1, 5)),
        ([5, 8, 3, 5, 8], False, (0, 2)),  # a second pair belongs to the answer
        ([5, 1, 2], False, (0, 3)),  # cut within the reasoning
        ([1, 2, 8, 3], False, (0, 3)),  # the prompt ended with the start
        ([1, 8, 5, 3], False, (0, 2)),
        ([1, 2, 3], False, None),
        ([1, 2, 3], True, (0, 3)),
        ([1, 8, 3], True, (0, 2)),
        ([], False, None),
    ],
)
def test_the_reasoning_lies_between_its_marks(answer, is_open, span):
    assert ReasoningMarks((5,), (8,), is_open).span(answer) == span


def test_a_mark_of_several_tokens_is_found_as_a_whole():
    marks = ReasoningMarks((5, 6), (5, 6, 7), False)
    assert marks.span([5, 7, 5, 6, 1, 5, 6, 7, 5, 6]) == (2, 8)


@pytest.mark.parametrize(
    ("ending", "is_open"),
    [("w31", False), ("w31 <think>", True), ("w31 <think> </think>", False), ("</think> <think>", True)],
)
def test_the_marks_are_those_of_the_template_and_the_prompt_says_whether_an_answer_begins_inside(
    thinking_tokenizer, ending, is_open
):
    template = "{{ messages[0]['content'] }} ... </think>"
    prompt = thinking_tokenizer(f"w9 {ending}").input_ids
    assert find_marks(template, thinking_tokenizer, prompt) == ReasoningMarks((5,), (8,), is_open)
    assert find_marks("{{ messages[0]['content'] }}", thinking_tokenizer, prompt) is None
