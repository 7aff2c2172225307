"""The grades of an evaluation, and the files of its results."""

import pytest

from data.benchmarks import Question
from data.templates import ReasoningMarks
from inference.evaluation.conclusion import Outcome, graded, write_results
from inference.results import records
from inference.results.records import Answer, Turn
from inference.results.served_runs import ServedRun, summarise_run


def outcome_of(drafters, benchmark="mt_bench", text="x"):
    """An evaluation in a server that wrote one answer with each drafter; the first is the baseline."""
    runs = {
        drafter: ServedRun([Answer(1, "a", drafter, [Turn(text, [5, 6], 3, [], 1.0)], [False])], 1.0, None, None)
        for drafter in drafters
    }
    summaries = {name: summarise_run(run, runs[drafters[0]], "a server", name, 1) for name, run in runs.items()}
    answers = {name: run.answers for name, run in runs.items()}
    return Outcome({"template": "plain"}, {}, {benchmark: summaries}, {benchmark: answers}, [], [])


def decode(tokens, **options):
    return "x"


def test_drafters_whose_names_are_alike_have_files_of_their_own(tmp_path):
    drafters = ["a b", "a_b", "a:b"]
    write_results(tmp_path, outcome_of(drafters), decode)
    files = (tmp_path / "answers" / "mt_bench").iterdir()
    assert sorted(records.read(file)[0].drafter for file in files) == sorted(drafters)


def test_plots_of_an_earlier_evaluation_are_gone(tmp_path):
    stale = tmp_path / "plots" / "gsm8k-speedup.png"
    stale.parent.mkdir()
    stale.touch()
    write_results(tmp_path, outcome_of(["none", "ctc"]), decode)
    assert [path.name for path in stale.parent.iterdir()] == ["mt_bench-concurrency.png"]


@pytest.mark.parametrize("is_raw", [False, True])
def test_answers_are_graded_without_their_reasoning(is_raw):
    marks = ReasoningMarks(("<think>", "</think>"), (5,), (8,), is_open=True)
    asked = [Question(1, "a", ("?",), "#### 5", is_raw=is_raw)]
    for text, quality in (("#### 4\n</think>\n#### 5", 100), ("#### 5", 100 * is_raw)):  # a raw prompt opens no mark
        found = graded(outcome_of(["none"], "gsm8k", text), {"gsm8k": asked}, None, marks)
        assert found["gsm8k"]["none"].quality == {"exact match": quality}
