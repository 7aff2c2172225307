"""Confidence intervals on synthetic data whose true values are known."""

from math import comb, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from inference.evaluate.intervals import interval, tail_probability

RATIO, SPEEDUP = (1, -1), (1, -1, -1, 1)


def accepted(rng, num):
    """Emitted tokens of a drafter, at most 200 per question, and its base forwards."""
    emitted = np.minimum(rng.lognormal(5, 0.6, num), 200).round() + 1
    return emitted, np.maximum(1, (emitted / (1 + rng.gamma(6, 0.3, num))).round())


def means(rng, num):
    """An acceptance length for each question, and ones."""
    return rng.lognormal(0.8, 0.35, num), np.ones(num)


def times(rng, num):
    """Seconds and tokens of the base alone, then of a drafter, on a machine with some noise."""
    tokens = np.minimum(rng.lognormal(4, 0.8, num), 200).round() + 1
    alone = 0.01 * tokens * rng.lognormal(0, 0.05, num)
    return alone, tokens, alone / rng.lognormal(0.5, 0.4, num) * rng.lognormal(0, 0.05, num), tokens


@pytest.mark.slow
@pytest.mark.parametrize("num", [20, 40, 80])
@pytest.mark.parametrize("make, powers", [(accepted, RATIO), (means, RATIO), (times, SPEEDUP)])
def test_intervals_contain_the_true_value_about_as_often_as_their_level_says(make, powers, num):
    rng = np.random.default_rng(3)
    truth = np.prod([column.sum() ** float(power) for column, power in zip(make(rng, 10**6), powers, strict=True)])
    found = [interval(make(rng, num), powers) for _ in range(500)]
    share = np.mean([low <= truth <= high for low, high in found])
    assert 0.90 <= share <= 0.97, share  # with more samples 0.92 to 0.95; of 500, the standard error is 0.01


def test_an_interval_surrounds_its_number_and_is_wider_for_fewer_questions():
    emitted, forwards = accepted(np.random.default_rng(2), 80)
    few, many = interval((emitted[:10], forwards[:10]), RATIO), interval((emitted, forwards), RATIO)
    assert many[0] < emitted.sum() / forwards.sum() < many[1]
    assert few[1] - few[0] > many[1] - many[0]
    assert interval((emitted, forwards), RATIO) == many, "the resampling is the same every time"


@pytest.mark.parametrize("num_rare, level", [(1, 0.9), (3, 0.95)])
def test_the_interval_of_a_rare_event_contains_zero_as_often_as_it_is_not_drawn(num_rare, level):
    num, steps = 20, 20
    # Of resamples of equally long questions, the number of rare ones is binomial: its quantiles are exact.
    chances = [comb(num, k) * (num_rare / num) ** k * (1 - num_rare / num) ** (num - k) for k in range(num + 1)]
    tail = NormalDist().cdf(-sqrt(num / (num - 1)) * {0.9: 1.729, 0.95: 2.093}[level])
    low, high = (next(k for k in range(num + 1) if sum(chances[: k + 1]) >= end) for end in (tail, 1 - tail))
    found = interval(([3] * num_rare + [0] * (num - num_rare), [steps] * num), RATIO, level)
    assert low == 0 and found == pytest.approx((0, 3 * high / (num * steps)))


def test_an_interval_beyond_the_resamples_keeps_an_end_of_zero():
    low, high = interval(([3] + [0] * 19, [20] * 20), RATIO, level=0.9999)
    assert low == 0 and 3 * 3 / 400 < high < 1


def test_equal_questions_have_an_empty_interval_and_one_question_has_none():
    assert interval(([6, 6, 6], [3, 3, 3]), RATIO) == (2.0, 2.0)
    assert interval(([0.3] * 7, [0.1] * 7), RATIO) == pytest.approx((3.0, 3.0), rel=1e-15)
    assert interval(([6], [3]), RATIO) is None
    assert interval(([6, 4], [0, 0]), RATIO) is None


@pytest.mark.parametrize("freedom, quantile", [(4, 2.776), (9, 2.262), (19, 2.093), (79, 1.990)])
def test_tails_agree_with_tabulated_quantiles_of_students_distribution(freedom, quantile):
    expected = NormalDist().cdf(-sqrt((freedom + 1) / freedom) * quantile)
    assert tail_probability(freedom + 1, level=0.95) == pytest.approx(expected, rel=0.01)
