"""Intervals on synthetic data whose truth is known."""

import numpy as np
import pytest

from inference.results.intervals import interval, spread, standard_error, student

RATIO, SPEEDUP = (1, -1), (1, -1, -1, 1)


def accepted(rng, num):
    """What a drafter emits, capped at 200 tokens a question, and its base forwards."""
    emitted = np.minimum(rng.lognormal(5, 0.6, num), 200).round() + 1
    return emitted, np.maximum(1, (emitted / (1 + rng.gamma(6, 0.3, num))).round())


def means(rng, num):
    """An acceptance length for each question, and one."""
    return rng.lognormal(0.8, 0.35, num), np.ones(num)


def times(rng, num):
    """Seconds and tokens of the base alone, then of a drafter, on a machine that is a little unsteady."""
    tokens = np.minimum(rng.lognormal(4, 0.8, num), 200).round() + 1
    alone = 0.01 * tokens * rng.lognormal(0, 0.05, num)
    return alone, tokens, alone / rng.lognormal(0.5, 0.4, num) * rng.lognormal(0, 0.05, num), tokens


@pytest.mark.parametrize("num", [20, 40, 80])
@pytest.mark.parametrize("make, powers", [(accepted, RATIO), (means, RATIO), (times, SPEEDUP)])
def test_intervals_hold_the_truth_as_often_as_they_say(make, powers, num):
    rng = np.random.default_rng(0)
    truth = np.prod([column.sum() ** float(power) for column, power in zip(make(rng, 10**6), powers, strict=True)])
    found = [interval(make(rng, num), powers) for _ in range(200)]
    share = np.mean([low <= truth <= high for low, high in found])
    assert 0.90 <= share <= 0.99, share


def test_an_interval_of_half_the_level_holds_the_truth_half_the_time():
    rng = np.random.default_rng(1)
    truth = np.exp(0.8 + 0.35**2 / 2)
    found = [interval(means(rng, 40), RATIO, level=0.5) for _ in range(300)]
    assert 0.4 <= np.mean([low <= truth <= high for low, high in found]) <= 0.6


def test_an_interval_lies_around_its_number_and_is_wider_for_fewer_questions():
    emitted, forwards = accepted(np.random.default_rng(2), 80)
    few, many = interval((emitted[:10], forwards[:10]), RATIO), interval((emitted, forwards), RATIO)
    assert many[0] < emitted.sum() / forwards.sum() < many[1]
    assert few[1] - few[0] > many[1] - many[0]
    assert interval((emitted, forwards), RATIO) == many, "the resampling is the same every time"


def test_equal_questions_close_the_interval_and_one_question_has_none():
    assert interval(([6, 6, 6], [3, 3, 3]), RATIO) == (2.0, 2.0)
    assert interval(([0.3] * 7, [0.1] * 7), RATIO) == pytest.approx((3.0, 3.0), rel=1e-15)
    assert interval(([6], [3]), RATIO) is None
    assert interval(([6, 4], [0, 0]), RATIO) is None


@pytest.mark.parametrize("freedom, tabled", [(4, 2.776), (9, 2.262), (19, 2.093), (79, 1.990)])
def test_students_quantiles_are_the_tabled_ones(freedom, tabled):
    assert student(0.975, freedom) == pytest.approx(tabled, rel=0.01)


def test_the_spread_and_the_standard_error_are_relative():
    assert spread([9.0, 10.0, 11.0]) == pytest.approx(0.1)
    assert standard_error([np.exp(-0.1), 1.0, np.exp(0.1)]) == pytest.approx(0.1 / np.sqrt(3))
    assert spread([5.0]) is standard_error([5.0]) is None
