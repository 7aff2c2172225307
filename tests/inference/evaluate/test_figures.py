"""The metrics of an evaluation, computed by hand on two questions of two turns."""

import math
from dataclasses import asdict, replace

import pytest

from inference.evaluate import figures
from inference.evaluate.answers import Answer, Turn, median_answers
from inference.evaluate.figures import first_difference
from inference.verifier.session import Step

SECONDS = (0.01, 0.1, 0.02, 0.03, 0.04)  # of each step's phases: 0.2 in all


def turn(tokens, steps, seconds, is_ended=False):
    """A turn: a prefill that emits one token, then ``steps`` of (emitted, accepted), each of root + 4 candidates."""
    prefill = Step(1, 0, 30, 0, 0, 0, SECONDS)
    costs = [Step(emitted, accepted, 1, 4, 0, 0, SECONDS) for emitted, accepted in steps]
    assert len(tokens) == 1 + sum(emitted for emitted, _ in steps)
    return Turn("", tokens, 30, [prefill, *costs], seconds, is_ended)


# In all: 14 tokens in 5.5 s; after the prefills 10 tokens in 5 steps.
CTC = [
    Answer(
        1,
        "writing",
        "ctc",
        # 7 tokens in 3 steps; the second turn is cut on an accepted token, so its step has no bonus token
        [turn([1, 2, 3, 4, 5, 6], [(3, 2), (2, 1)], 2.0, is_ended=True), turn([7, 8, 9], [(2, 2)], 1.0)],
    ),
    # 3 tokens in 2 steps; the second turn ends with its prefill
    Answer(2, "math", "ctc", [turn([1, 3, 5, 7], [(1, 0), (2, 1)], 2.0), turn([2], [], 0.5, True)]),
]
# The same 14 tokens, one a step, in 14 s.
NONE = [
    replace(
        answer,
        drafter="none",
        turns=[turn(t.token_ids, [(1, 0)] * (len(t.token_ids) - 1), float(len(t.token_ids))) for t in answer.turns],
    )
    for answer in CTC
]


def summarise(answers, baseline):
    """Compare answers of one repeat."""
    return figures.summarise([answers], [baseline])


@pytest.fixture
def summary():
    return summarise(CTC, NONE)


def test_acceptance_excludes_the_prefill_where_it_does_not_say_otherwise(summary):
    own = summary.acceptance
    assert (own.length.value, own.mean.value) == (pytest.approx(10 / 5), pytest.approx((7 / 3 + 3 / 2) / 2))
    assert own.ended == pytest.approx(5 / 2)  # question 1, turn 1; question 2, turn 2 adds nothing
    assert own.conventions["block efficiency (Ouroboros)"] == pytest.approx(14 / 9)
    assert (own.fed_per_step, own.draft_efficiency) == (pytest.approx(5), pytest.approx((2 + 1 + 2 + 0 + 1) / 20))
    assert [rate.rate.value for rate in own.rates] == pytest.approx([4 / 5, 2 / 5])


def test_speed_counts_the_prefill(summary):
    assert (summary.tokens, summary.speed.seconds) == (14, 5.5)
    assert summary.speed.tokens_per_second == summary.speed.wall.value == pytest.approx(14 / 5.5)


def test_each_category_is_summarised_separately(summary):
    writing, math = summary.by_category["writing"], summary.by_category["math"]
    assert list(summary.by_category) == ["writing", "math"]
    assert (writing.acceptance, writing.wall) == (pytest.approx(7 / 3), pytest.approx(9 / 3))
    assert (math.acceptance, math.wall) == (pytest.approx(3 / 2), pytest.approx(5 / 2.5))
    assert (math.questions, math.identical) == (1, 1)


def test_the_baseline_compared_with_itself_has_speedup_one(summary):
    vanilla = summarise(NONE, NONE)
    assert vanilla.is_baseline and not summary.is_baseline
    own = vanilla.acceptance
    assert (own.length.value, vanilla.speed.speedup.value, own.fed_per_step) == (1.0, 1.0, 5.0)
    assert own.rates == []
    assert (summary.identical, summary.questions, summary.first_divergence) == (2, 2, None)


@pytest.mark.parametrize(("tokens", "position"), [([1, 3, 6, 7], 2), ([1, 3, 5], 3), ([1, 3, 5, 7, 9], 4), ([], 0)])
def test_the_first_divergence_is_located(tokens, position):
    first, second = CTC
    changed = replace(second, turns=[replace(second.turns[0], token_ids=tokens), second.turns[1]])
    summary = summarise([first, changed], NONE)
    assert summary.identical == 1
    assert summary.first_divergence == (2, 0, position)
    assert summary.by_category["math"].identical == 0


def test_questions_are_paired_by_their_id_and_a_missing_turn_is_a_difference():
    assert first_difference(replace(CTC[0], turns=CTC[0].turns[:1]), NONE[0]) == (1, 0)
    assert summarise(CTC, NONE[::-1]) == summarise(CTC, NONE)
    assert summarise(CTC[1:], NONE).speed.wall.value == pytest.approx(5 / 2.5)
    with pytest.raises(ValueError, match="no answer to question 2"):
        summarise(CTC, NONE[:1])


def test_unmeasured_metrics_are_none():
    only_prefill = [Answer(1, "math", "none", [turn([4], [], 0.5)])]
    summary = summarise(only_prefill, only_prefill)
    assert summary.acceptance.length.value is summary.acceptance.ended is summary.acceptance.length.interval is None
    assert summary.speed.speedup.value == 1.0
    with pytest.raises(ValueError, match="no answers"):
        summarise([], NONE)


def test_intervals_contain_their_values_and_stay_within_those_of_the_questions(summary):
    for found, least, most in (
        (summary.acceptance.length, 3 / 2, 7 / 3),
        (summary.acceptance.mean, 3 / 2, 7 / 3),
        (summary.speed.wall, 2.0, 3.0),
        (summary.speed.speedup, 0.0, math.inf),
    ):
        low, high = found.interval
        assert least <= low <= found.value <= high <= most
    alone = summarise(NONE, NONE)
    assert alone.speed.speedup.interval == alone.speed.wall.interval == alone.acceptance.length.interval == (1.0, 1.0)


def slower(answers, factors):
    """Return the answers with the time of each question multiplied by its factor."""
    return [
        replace(answer, turns=[replace(turn, seconds=turn.seconds * factor) for turn in answer.turns])
        for answer, factor in zip(answers, factors, strict=True)
    ]


def test_each_question_keeps_its_answer_with_the_median_time():
    repeats = [slower(CTC, factors) for factors in ([1, 5], [3, 1], [2, 9])]
    assert [answer.seconds for answer in median_answers(repeats)] == [2 * 3.0, 5 * 2.5]
    assert median_answers(repeats[:2]) == [repeats[0][0], repeats[1][1]], "of two answers the faster one"


def test_the_peak_is_the_maximum_over_all_answers(summary):
    assert summary.speed.peak_bytes is None
    peaks = [replace(answer, peak_bytes=peak) for answer, peak in zip(CTC, (7, 9), strict=True)]
    assert summarise(peaks, NONE).speed.peak_bytes == 9


def test_a_slower_machine_changes_only_what_the_clock_says(summary):
    slow, same = asdict(summarise(slower(CTC, [2, 3]), NONE)), asdict(summary)
    assert {name for name in same if slow[name] != same[name]} == {"speed", "by_category"}
    changed = {name for name, value in same["speed"].items() if slow["speed"][name] != value}
    assert changed >= {"seconds", "speedup", "wall"}
    for category, found in same["by_category"].items():
        assert {name for name in found if found[name] != slow["by_category"][category][name]} <= {"speedup", "wall"}
