"""Figures of draft tokens, counted by hand on two questions, and the conversions between the conventions."""

from dataclasses import replace

import pytest

from inference.reporting.tables import draft_rows
from inference.results import intervals
from inference.results.draft_figures import (
    DraftFigures,
    PositionRate,
    acceptance_length_of_rates,
    count_drafts,
    draft_figures,
    expected_acceptance_length,
    unconditional_rates,
)
from inference.results.metrics import summarise
from inference.results.records import Answer
from inference.verifier.session import StepCost


def step(emitted, accepted, drafted=4, pending=1, scratch=0):
    return StepCost(emitted, accepted, pending, drafted, scratch, 0, (0.0,) * 5)


PREFILLS = [step(1, 0, 0, 30), step(2, 1, 4, 30), step(1, 0, 0, 9)]
QUESTIONS = [
    [[PREFILLS[0], step(3, 2), step(1, 0), step(5, 4)], [PREFILLS[1], step(2, 1, scratch=3)]],
    [[PREFILLS[2], step(1, 0, drafted=0), step(3, 2)]],
]


def test_the_figures_of_each_convention():
    counts = count_drafts([turn for turns in QUESTIONS for turn in turns])
    assert (counts.prefills, counts.prefill_tokens, counts.steps, counts.drafting_steps) == (3, 4, 6, 5)
    assert (counts.emitted, counts.accepted, counts.drafted, counts.fed) == (15, 9, 20, 6 + 20 + 3)
    assert counts.acceptance_length == 15 / 6
    assert counts.block_efficiency == 19 / 9
    assert counts.sglang_accept_length == 19 / 6
    assert counts.vllm_acceptance_length == 1 + 9 / 5, "a step without drafts does not count"
    assert counts.draft_efficiency == 9 / 20
    assert counts.fed_per_token == 29 / 15
    assert counts.wasted_per_token == (20 + 3 - 9) / 15
    assert list(counts.by_convention().values()) == [15 / 6, 19 / 9, 19 / 6, 1 + 9 / 5]


def test_the_table_of_positions_shows_both_rates_with_their_intervals():
    rates = [PositionRate(0.8, (0.7, 0.9), 0.8, (0.7, 0.9)), PositionRate(0.4, (0.3, 0.6), 0.5, (0.35, 0.65))]
    plain = summarise([Answer(1, "a", "ctc", [], [])], [Answer(1, "a", "none", [], [])])
    short = replace(plain, drafter="short", draft_tokens=DraftFigures(rates[:1], 1.5, 0.5, {}))
    headings, rows = draft_rows({"ctc": replace(plain, draft_tokens=DraftFigures(rates, 2.0, 1.0, {})), "short": short})
    assert headings[4:] == ["1", "2"]
    assert [(row.cells[0], *row.cells[4:]) for row in rows] == [
        ("ctc", "0.80", "0.40"),
        ("given the one before", "0.80", "0.50"),
        ("short", "0.80", "–"),
        ("given the one before", "0.80", "–"),
    ]
    assert rows[0].small == {4: "0.70 – 0.90", 5: "0.30 – 0.60"} and rows[1].small[5] == "0.35 – 0.65"


def test_acceptance_rates_by_position_with_intervals_over_the_questions():
    rates = draft_figures(QUESTIONS).rates
    assert [rate.rate for rate in rates] == pytest.approx([4 / 6, 3 / 6, 1 / 6, 1 / 6])
    assert [rate.conditional_rate for rate in rates] == pytest.approx([4 / 6, 3 / 4, 1 / 3, 1])
    assert rates[0].interval == rates[0].conditional_interval == intervals.interval([[3, 1], [4, 2]], (1, -1))
    assert rates[1].conditional_interval == intervals.interval([[2, 1], [3, 1]], (1, -1))


def test_rates_convert_to_the_acceptance_length_and_back():
    figures = draft_figures(QUESTIONS)
    rates = [rate.rate for rate in figures.rates]
    assert acceptance_length_of_rates(rates) == pytest.approx(15 / 6), "the sum of the rates is the mean accepted"
    assert unconditional_rates([rate.conditional_rate for rate in figures.rates]) == pytest.approx(rates)
    assert expected_acceptance_length(0.7, 5) == pytest.approx((1 - 0.7**6) / (1 - 0.7))


def test_a_drafter_that_drafts_nothing_has_no_rates():
    figures = draft_figures([[[PREFILLS[0], step(1, 0, 0), step(1, 0, 0)]]])
    assert (figures.rates, figures.fed_per_token, figures.wasted_per_token) == ([], 1, 0)
    assert "mean acceptance length (vLLM)" not in figures.conventions
