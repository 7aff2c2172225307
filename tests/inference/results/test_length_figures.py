"""Figures by length of the text, counted by hand on steps whose positions are known."""

from dataclasses import asdict

import pytest

from inference.reporting.lengths import length_tables
from inference.reporting.plots import applicable
from inference.reporting.report import write_results
from inference.results import records
from inference.results.folders import read, summary_from_json
from inference.results.length_figures import LengthSeconds, length_figures
from inference.results.metrics import summarise
from inference.results.records import Answer, Turn
from inference.verifier.session import StepCost


def turn(prompt_tokens, emitted, seconds):
    """A turn whose steps emit so many tokens and take so many seconds each; the first is the prefill."""
    costs = [StepCost(e, e - 1, 1, 4, 0, 0, (s, 0, 0, 0, 0)) for e, s in zip(emitted, seconds, strict=True)]
    return Turn("", list(range(sum(emitted))), prompt_tokens, costs, sum(seconds))


ANSWERS = [
    # The steps after the prefill begin at 251, 254 and 257 tokens, those of the second turn at 601.
    Answer(1, "a", "ctc", [turn(250, [1, 3, 3, 2], [9.0, 0.1, 0.2, 0.3]), turn(600, [1, 4], [8.0, 0.4])], [True] * 2),
    Answer(2, "a", "ctc", [turn(255, [1, 1], [7.0, 0.6]), turn(256, [1], [5.0])], [True, True]),
]


def test_a_step_counts_where_its_text_ends():
    figures, seconds = length_figures(ANSWERS)
    found = [(own.start, own.end, own.steps, own.acceptance_length) for own in figures.by_position]
    assert found == [(0, 256, 2, 3.0), (256, 512, 2, 1.5), (512, 1024, 1, 4.0)]
    assert seconds.by_position == pytest.approx([0.15, 0.45, 0.4])
    assert figures.by_position[0].acceptance_interval is None, "one question has no interval"
    low, high = figures.by_position[1].acceptance_interval
    assert 1 <= low < 1.5 < high <= 2


def test_a_turn_counts_at_the_length_of_its_prompt():
    figures, seconds = length_figures(ANSWERS)
    found = [(own.start, own.steps, own.acceptance_length) for own in figures.by_prompt]
    assert found == [(0, 4, 9 / 4), (256, 0, None), (512, 1, 4.0)], "the prefill of 256 tokens has no step behind it"
    assert seconds == LengthSeconds(seconds.by_position, [pytest.approx(0.25), None, 0.4], [8.0, 5.0, 8.0])


def test_the_tables_name_the_ranges_and_leave_out_what_is_one_range():
    summary = summarise(ANSWERS, ANSWERS)
    (title, headings, rows), prompts = length_tables({"ctc": summary})
    assert title.endswith("by position in the context") and headings == ["tokens", "ctc"]
    assert [row.cells for row in rows] == [["0 to 255", "3.00"], ["256 to 511", "1.50"], ["512 to 1,023", "4.00"]]
    assert rows[0].small == {1: "150.0 ms"} and prompts[2][1].cells == ["256 to 511", "–"]
    assert {"positions", "prompts"} <= set(applicable({"ctc": summary}))
    short = summarise(ANSWERS[1:], ANSWERS)
    assert [title for title, *_ in length_tables({"ctc": short})] == [prompts[0]]


def test_results_of_older_versions_get_the_figures_from_their_answers(tmp_path):
    summary = summarise(ANSWERS, ANSWERS)
    values = asdict(summary)
    del values["lengths"], values["length_seconds"]
    old = summary_from_json(values)
    assert old.lengths is None and length_tables({"ctc": old}) == [] and "positions" not in applicable({"ctc": old})
    write_results(tmp_path, {"b": {"ctc": old}}, {})
    assert read(tmp_path).summaries["b"]["ctc"] == old, "the answers are gone"
    records.write(tmp_path / "answers" / "b" / "ctc.jsonl", ANSWERS)
    found = read(tmp_path).summaries["b"]["ctc"]
    assert found == summary
