"""Acceptance in reasoning and in the rest of the answers, counted by hand."""

from dataclasses import asdict, replace

import pytest

from data.templates import ReasoningMarks
from inference.reporting.exports import summary_records
from inference.reporting.tables import drafter_rows
from inference.results.draft_figures import GroupAcceptance
from inference.results.folders import EvaluationResults, summary_from_json
from inference.results.metrics import summarise
from inference.results.reasoning_figures import reasoning_figures
from inference.results.records import Answer, Turn
from inference.verifier.session import StepCost

MARKS = ReasoningMarks(("<think>", "</think>"), (5,), (8,), False)


def turn(tokens, emitted):
    """A turn whose steps emit so many tokens each; the first is the prefill."""
    assert sum(emitted) == len(tokens)
    return Turn("", tokens, 9, [StepCost(e, e - 1, 1, 4, 0, 0, (0.1,) * 5) for e in emitted], 1.0)


ANSWERS = [
    # Reasoning at positions 0 to 3. Of the steps behind the prefill those at 1 and 3 begin inside, that at 5 does not.
    Answer(1, "a", "ctc", [turn([5, 1, 1, 8, 3, 3, 3, 2], [1, 2, 2, 3])], [True]),
    Answer(2, "a", "ctc", [turn([3, 3, 3], [1, 2]), turn([5, 1, 1, 1], [1, 3])], [True, False]),
]


def test_a_step_belongs_to_the_part_of_its_first_token():
    figures = reasoning_figures(ANSWERS, MARKS)
    assert figures.turns == 2, "the turn without marks is in neither part"
    assert (figures.reasoning.steps, figures.reasoning.acceptance_length) == (3, pytest.approx(7 / 3))
    assert figures.answer == GroupAcceptance(1, 3.0, None)
    low, high = figures.reasoning.acceptance_interval
    assert 2 <= low < 7 / 3 < high <= 3


def test_there_are_no_figures_without_marks():
    assert reasoning_figures(ANSWERS, None) is None
    assert reasoning_figures(ANSWERS, ReasoningMarks(("a", "b"), (11,), (12,), False)) is None


def test_the_table_has_columns_for_both_parts_where_there_are_figures():
    plain = summarise(ANSWERS, ANSWERS)
    summary = replace(plain, reasoning=reasoning_figures(ANSWERS, MARKS))
    headings, (row,) = drafter_rows({"ctc": summary})
    cells = dict(zip(headings, row.cells, strict=True))
    assert (cells["in reasoning"], cells["in the answer"]) == ("2.33", "3.00")
    assert "in reasoning" not in drafter_rows({"ctc": plain})[0]
    assert summary_from_json(asdict(summary)) == summary
    (record,) = summary_records([EvaluationResults("e", {"e": {}}, {"file": {"ctc": summary}}, {})])
    assert record["acceptance_length_answer"] == 3.0
