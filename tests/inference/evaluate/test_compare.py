"""Paired comparisons find a planted regression of 3 %, and mark nothing in equal evaluations."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from inference.evaluate.answers import Answer, Turn
from inference.evaluate.compare import ERROR_RATE, compare, differing_conditions, unpaired
from inference.evaluate.conditions import BenchmarkConditions, DrafterConditions, RunRecord
from inference.evaluate.figures import summarise
from inference.evaluate.results import EvaluationResults
from inference.evaluate.step_times import MedianStepTimes, timing_error
from inference.verifier.session import Step
from tests.inference.evaluate.conftest import CONDITIONS

NUM_QUESTIONS, NUM_TOKENS, NUM_RUNS = 40, 120, 15
DRAFTERS = {"none": DrafterConditions("none"), "ctc": DrafterConditions("ctc=folder")}
RUN = replace(CONDITIONS, drafters=DRAFTERS, benchmarks={"mt_bench": BenchmarkConditions("abc", 64)})


def answer(drafter, question_id, emitted, rng, speed=1.0):
    """An answer whose steps emit these numbers of tokens, with times that scatter by 5 %."""
    seconds = speed * 0.01 * np.exp(rng.normal(0, 0.05, 1 + len(emitted)))
    fed = 8 if drafter != "none" else 0
    counts = [1, *emitted]
    costs = [Step(n, n - 1, 1, fed, 0, 0, (0.0, s, 0.0, 0.0, 0.0)) for n, s in zip(counts, seconds, strict=True)]
    turn = Turn("", [7] * sum(counts), 5, costs, float(seconds.sum()), False)
    return Answer(question_id, "all", drafter, [turn])


def potentials(rng):
    """Of each question, the number of drafts that would be accepted at each position of its text: some are easy."""
    return [rng.geometric(rng.uniform(0.25, 0.6), NUM_TOKENS) - 1 for _ in range(NUM_QUESTIONS)]


def steps(accepted, forgets=0.0, rng=None):
    """Tokens that the steps emit, of which a share ``forgets`` loses one accepted draft."""
    emitted, at = [], 0
    while at < len(accepted):
        lost = rng is not None and rng.random() < forgets
        emitted.append(1 + max(0, int(accepted[at]) - lost))
        at += emitted[-1]
    return emitted


def evaluation(name, emitted, rng, summary=None):
    """An evaluation of a drafter that emitted these numbers of tokens, question by question."""
    own = [answer("ctc", at, each, rng) for at, each in enumerate(emitted)]
    base = [answer("none", at, [1] * 8, rng) for at in range(len(emitted))]
    summary = summary or summarise([own], [base])
    summary = with_timing_error(summary, timing_error(MedianStepTimes([own]), MedianStepTimes([base])))
    summaries = {"mt_bench": {"none": replace(summary, drafter="none"), "ctc": summary}}
    return EvaluationResults(RUN, RunRecord(), summaries, {"mt_bench": {"none": base, "ctc": own}}, name)


def with_timing_error(summary, error):
    return replace(summary, speed=replace(summary.speed, timing_error=error))


def changed(results, **changes):
    """The evaluation under other conditions."""
    return replace(results, conditions=replace(results.conditions, **changes))


@pytest.fixture(scope="module")
def verdicts():
    """The verdicts on acceptance length and speed-up over many pairs of runs, by what was planted."""
    found = {"nothing": [], "3 % less": []}
    summary = None
    for seed in range(NUM_RUNS):
        rng = np.random.default_rng(seed)
        texts = potentials(rng)
        old = evaluation("old", [steps(own) for own in texts], rng, summary)
        summary = old.summaries["mt_bench"]["ctc"]
        # Equal in distribution: drafts of both are lost at random, as in sampling with different seeds.
        equal = [evaluation(name, [steps(own, 0.1, rng) for own in texts], rng, summary) for name in "ab"]
        found["nothing"].append(compare(*equal))
        worse = evaluation("new", [steps(own, 0.138, rng) for own in texts], rng, summary)
        found["3 % less"].append(compare(old, worse))
    return found


@pytest.mark.slow
def test_a_planted_regression_of_3_percent_is_found(verdicts):
    lengths = [length for length, _ in verdicts["3 % less"]]
    assert np.mean([each.change for each in lengths]) == pytest.approx(-0.03, abs=0.005)
    assert np.mean([each.verdict == "regression" for each in lengths]) >= 0.9
    assert not [each for pair in verdicts["3 % less"] for each in pair if each.verdict == "improvement"]


@pytest.mark.slow
def test_equal_evaluations_are_marked_no_more_often_than_stated(verdicts):
    marked = [pair for pair in verdicts["nothing"] if any(each.verdict != "none found" for each in pair)]
    assert len(marked) <= 2.5 * ERROR_RATE * NUM_RUNS
    lengths = [length for length, _ in verdicts["nothing"]]
    assert np.std([each.change for each in lengths]) > 0.003, "the runs differ by chance"


def test_texts_are_compared_question_by_question():
    def emitting(*gains):
        return evaluation("some", [[*gains, 1 + at % 3] for at in range(12)], np.random.default_rng(0))

    full, less = emitting(5, 5, 5), emitting(5, 5, 4)
    length, speedup = compare(full, less)
    for found, results in ((length.before, full), (length.after, less)):
        assert found == pytest.approx(results.summaries["mt_bench"]["ctc"].acceptance.length.value)
    assert speedup.after == pytest.approx(less.summaries["mt_bench"]["ctc"].speed.speedup.value)
    assert -0.1 < length.change < 0 and length.verdict == "regression" and length.num_questions == 12
    length, speedup = compare(full, full)
    assert (length.change, length.interval, length.verdict) == (0, (0, 0), "none found")
    assert compare(less, full)[0].verdict == "improvement"


def test_what_cannot_be_judged_is_not():
    rng = np.random.default_rng(3)
    old = evaluation("old", [steps(own) for own in potentials(rng)], rng)
    summary = with_timing_error(old.summaries["mt_bench"]["ctc"], None)
    untimed = replace(old, summaries={"mt_bench": {**old.summaries["mt_bench"], "ctc": summary}})
    assert [each.verdict for each in compare(old, untimed)] == ["none found", "not judged"]
    few = {name: own[:9] for name, own in old.answers["mt_bench"].items()}
    assert {each.verdict for each in compare(old, replace(old, answers={"mt_bench": few}))} == {"not judged"}


@pytest.mark.parametrize("num_drafters, quantile", [(1, 2.2414), (2, 2.4977)])  # of 1 - 0.05 / (4 n), from a table
def test_timing_errors_widen_at_the_simultaneous_level_of_all_figures(num_drafters, quantile):
    still = SimpleNamespace(normal=lambda mean, deviation, size: np.zeros(size))
    old = evaluation("old", [[2, 2, 3]] * 12, still)
    summary, own = with_timing_error(old.summaries["mt_bench"]["ctc"], 0.05), old.answers["mt_bench"]
    names = [f"ctc {at}" for at in range(num_drafters)]
    summaries = {"none": old.summaries["mt_bench"]["none"]} | {n: replace(summary, drafter=n) for n in names}
    many = replace(old, summaries={"mt_bench": summaries})
    many = replace(many, answers={"mt_bench": {"none": own["none"]} | dict.fromkeys(names, own["ctc"])})
    speedups = [each for each in compare(many, many) if each.figure == "speed-up"]
    half = 0.05 * 2**0.5 * quantile / 1.95996  # equal questions leave the bootstrap no width
    for each in speedups:
        assert np.log1p(each.interval) == pytest.approx([-half, half], rel=1e-4)
    assert len(speedups) == num_drafters


def test_other_prompts_are_refused_and_other_conditions_are_named():
    rng = np.random.default_rng(3)
    old = evaluation("old", [[2, 2, 3]] * 10, rng)
    other = {
        name: [replace(each, turns=[replace(each.turns[0], prompt_tokens=6)]) for each in own]
        for name, own in old.answers["mt_bench"].items()
    }
    with pytest.raises(ValueError, match=r"question 0: its prompt has 5 tokens in one evaluation and 6 in the other"):
        compare(old, replace(old, answers={"mt_bench": other}))
    with pytest.raises(ValueError, match="share no answered question of a drafter"):
        compare(old, replace(old, summaries={"gsm8k": old.summaries["mt_bench"]}))
    assert differing_conditions(old, changed(old, dtype="bfloat16")) == ["dtype: float32 and bfloat16"]


def test_what_only_one_evaluation_has_is_named():
    old = evaluation("old", [[2, 2, 3]] * 12, np.random.default_rng(3))
    (of,), (answers,) = old.summaries.values(), old.answers.values()
    more = replace(old, summaries={"mt_bench": of, "gsm8k": of}, answers={"mt_bench": answers, "gsm8k": answers})
    assert (unpaired(more, old), unpaired(old, more)) == (["the benchmark gsm8k"], [])
    added = replace(old, summaries={"mt_bench": {**of, "eagle": replace(of["ctc"], drafter="eagle")}})
    assert (unpaired(added, old), unpaired(old, added)) == (["mt_bench: the drafter eagle"], [])
    fewer = replace(old, answers={"mt_bench": {name: own[:2] for name, own in answers.items()}})
    lost = "mt_bench, ctc: 10 of 12 answers, to the questions 2, 3, 4, 5, 6, ..."
    assert (unpaired(old, fewer), unpaired(fewer, old)) == ([lost], [])
    cut = [replace(each, turns=[replace(each.turns[0], steps=each.turns[0].steps[:1])]) for each in answers["ctc"]]
    ended = replace(old, answers={"mt_bench": {**answers, "ctc": cut}})
    assert unpaired(old, ended)[0].startswith("mt_bench, ctc: 12 of 12 answers")
    summaries = {"mt_bench": {"none": of["none"], "new": of["ctc"]}}
    renamed = replace(old, summaries=summaries, answers={"mt_bench": {"none": answers["none"], "new": answers["ctc"]}})
    said = "the only drafters are compared whatever they are called"
    assert unpaired(old, renamed) == unpaired(renamed, old) == [], said
