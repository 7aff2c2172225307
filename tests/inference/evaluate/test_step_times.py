"""Speed-ups by typical step times: exact without load, and hardly moved by load that wall times show in full."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from inference.evaluate import figures, intervals
from inference.evaluate.answers import Answer, Turn
from inference.evaluate.step_times import MIN_STEPS, MedianStepTimes, median_costs, timing_error
from inference.verifier.session import Step

NUM_TOKENS = 240


def summarise(answers, baseline):
    """Compare answers of one repeat."""
    return figures.summarise([answers], [baseline])


def make_answers(name, fed_and_emitted, rng, num_questions=12, noise=0.03):
    """Answers of equal length whose steps take 2 ms and 0.1 ms a fed token, and up to twice that by the question."""
    answers = []
    for question in range(num_questions):
        steps, emitted = [Step(1, 0, 40, 0, 0, 0, (0.0, 0.02, 0.0, 0.0, 0.0))], 1
        while emitted < NUM_TOKENS:
            fed, gained = fed_and_emitted(rng)
            gained = min(gained, NUM_TOKENS - emitted)
            seconds = (0.002 + 0.0001 * fed) * (1 + question / 12) * math.exp(noise * rng.standard_normal())
            steps.append(Step(gained, gained - 1, 1, fed - 1, 0, 0, (0.1 * seconds, 0.9 * seconds, 0.0, 0.0, 0.0)))
            emitted += gained
        seconds = sum(sum(step.seconds) for step in steps) + 0.001
        turn = Turn("", list(range(NUM_TOKENS)), 40, steps, seconds, True)
        answers.append(Answer(question, "abc"[question % 3], name, [turn]))
    return answers


def drafted(rng):
    """Few kinds of steps are frequent, as with n-grams: nothing is found, the whole draft, or any length between."""
    fed = int(rng.choice([1, 17, rng.integers(2, 17)], p=[0.3, 0.55, 0.15]))
    return fed, int(rng.integers(1, 2 + min(fed - 1, 5)))


def loaded(answers, share, rng, factor=3.0):
    """The answers on a machine where some steps take ``factor`` times as long."""
    changed = []
    for answer in answers:
        (turn,) = answer.turns
        factors = np.where(rng.random(len(turn.steps)) < share, factor, 1.0)
        steps = [
            replace(step, seconds=tuple(value * own for value in step.seconds))
            for step, own in zip(turn.steps, factors, strict=True)
        ]
        added = sum(sum(step.seconds) for step in steps) - sum(sum(step.seconds) for step in turn.steps)
        changed.append(replace(answer, turns=[replace(turn, steps=steps, seconds=turn.seconds + added)]))
    return changed


@pytest.fixture(scope="module")
def rng():
    return np.random.default_rng(3)


@pytest.fixture(scope="module")
def both(rng):
    """The answers of a drafter and of the base alone on a quiet machine."""
    return make_answers("ngram", drafted, rng), make_answers("none", lambda rng: (1, 1), rng)


def test_load_on_one_arm_moves_the_wall_speedup_and_hardly_the_speedup(both, rng):
    ngram, none = both
    truth = summarise(ngram, none)
    assert truth.speed.speedup.value == pytest.approx(truth.speed.wall.value, rel=0.01), "on a quiet machine"
    for answers, baseline in ((loaded(ngram, 0.2, rng), none), (ngram, loaded(none, 0.2, rng))):
        summary = summarise(answers, baseline)
        assert abs(math.log(summary.speed.wall.value / truth.speed.wall.value)) > math.log(1.2)
        assert summary.speed.speedup.value == pytest.approx(truth.speed.wall.value, rel=0.02)
        low, high = summary.speed.speedup.interval
        assert low < truth.speed.wall.value < high
        for category, found in summary.by_category.items():
            assert found.speedup == pytest.approx(truth.by_category[category].wall, rel=0.03)


def test_questions_with_slow_steps_and_long_drafts_are_not_mistaken_for_the_rest():
    """One question of 60 slow steps in three drafts, one of 40 fast steps that nothing is found for: exactly 2x."""

    def answers(name, fed, counts):
        found = []
        for question, (count, seconds) in enumerate(zip(counts, (0.004, 0.002), strict=True)):
            prefill = Step(1, 0, 9, 0, 0, 0, (0.0,) * 5)
            steps = [prefill, *[Step(1, 0, 1, fed - 1, 0, 0, (0.0, seconds, 0.0, 0.0, 0.0))] * count]
            turn = Turn("", list(range(50)), 9, steps, count * seconds, True)
            found.append(Answer(question, "a", name, [turn]))
        return found

    summary = summarise(answers("ngram", 5, (20, 40)), answers("none", 1, (60, 40)))
    assert summary.speed.speedup.value == pytest.approx(summary.speed.wall.value) == pytest.approx(2.0)


def test_time_in_which_the_thread_waited_for_a_core_does_not_count(both, rng):
    ngram, none = both
    truth = summarise(ngram, none)
    slow = []
    for before, now in zip(ngram, loaded(ngram, 0.9, rng), strict=True):
        cpu_seconds = [sum(step.seconds) for step in before.turns[0].steps]
        cpu_seconds[0] += 0.001  # what a turn needs besides its steps
        waited = now.turns[0].seconds + 2.0  # between the steps
        slow.append(replace(now, turns=[replace(now.turns[0], cpu_seconds=cpu_seconds, seconds=waited)]))
    summary = summarise(slow, none)
    assert summary.speed.wall.value < 0.5 * truth.speed.wall.value
    found = summary.speed.speedup.value
    assert found == pytest.approx(truth.speed.speedup.value, rel=1e-6), "most steps are slow, so medians alone fail"


def test_every_repeat_counts(both, rng):
    ngram, none = both
    truth = summarise(ngram, none)
    slow = loaded(ngram, 0.9, rng)
    repeated = figures.summarise([slow, ngram, ngram], [none] * 3)
    assert repeated.speed.speedup.value == pytest.approx(truth.speed.wall.value, rel=0.02)
    assert summarise(slow, none).speed.speedup.value < 0.5 * truth.speed.wall.value


def test_rare_kinds_of_steps_share_the_median_of_their_neighbours():
    costs = median_costs([(1, 1.0)] * MIN_STEPS + [(2, 4.0), (3, 2.0), (4, 9.0)] + [(9, 3.0)] * (2 * MIN_STEPS))
    assert costs == {1: 1.0, 2: 3.0, 3: 3.0, 4: 3.0, 9: 3.0}
    assert median_costs([(1, 1.0)] * MIN_STEPS + [(2, 7.0)]) == {1: 1.0, 2: 1.0}, "the rest joins the last bin"
    assert median_costs([]) == {}


def test_the_timing_error_is_that_of_the_rounds(both, rng):
    ngram, none = both
    once = timing_error(MedianStepTimes([ngram]), MedianStepTimes([none]))
    assert 0 < once < 0.02
    assert timing_error(MedianStepTimes([none]), MedianStepTimes([none])) == 0
    assert timing_error(MedianStepTimes([ngram[:1]]), MedianStepTimes([none[:1]])) is None, "one round has no spread"
    slow = [loaded([answer], 0.9, rng)[0] if index % 2 else answer for index, answer in enumerate(ngram)]
    assert timing_error(MedianStepTimes([slow]), MedianStepTimes([none])) > 0.2
    repeats = [make_answers("ngram", drafted, np.random.default_rng(5)) for _ in range(2)]
    same = MedianStepTimes(repeats), MedianStepTimes([none, none])
    assert timing_error(*same) == pytest.approx(0, abs=1e-9), "equal repeats leave nothing open, unlike questions"


def test_the_half_width_agrees_with_scipy():
    values = [0.3, 0.9, 0.5, 0.4, 0.7]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert intervals.half_width([[value] for value in values]) == pytest.approx((high - low) / 2)
    assert intervals.half_width([values]) == pytest.approx((high - low) / 2)
    shifted = [[0.3, 0.9, 0.5], [10.4, 10.7], [99.0]]
    residuals = np.concatenate([np.array(group) - np.mean(group) for group in shifted[:2]])
    error = np.sqrt((residuals**2).sum() / 3 / 5)
    assert intervals.half_width(shifted) == pytest.approx(stats.t.ppf(0.975, 3) * error)
    assert intervals.half_width([[1.0]]) is intervals.half_width([]) is None
