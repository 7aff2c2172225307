"""Logistic mixing: probabilities that come true, from predictors that are right more or less often."""

import random
from math import log

import pytest

from drafters.merged import LogisticMixer, combine, log_odds


def test_what_two_predictors_say_about_the_tokens_that_either_names():
    pairs = dict(combine({5: 0.5, 6: 0.3}, {6: 0.6, 7: 0.1}))
    assert pairs[5] == ("first", 0.0, pytest.approx(log(0.3 / 0.7)))
    assert pairs[6] == pytest.approx(("both", log(0.3 / 0.7), log(0.6 / 0.4)))
    assert pairs[7] == pytest.approx(("second", log(0.2 / 0.8), log(0.1 / 0.9)))
    assert dict(combine({5: 0.5}, {})) == {5: ("first alone", 0.0, 0.0)}
    assert dict(combine({}, {5: 0.5})) == {5: ("second alone", 0.0, 0.0)}
    assert combine({}, {}) == []


def test_certain_predictors_have_finite_log_odds():
    assert 5 < log_odds(1.0) < 10 and log_odds(0.0) == pytest.approx(-log_odds(1.0))
    assert all(-10 < value < 10 for _, (_, *odds) in combine({1: 1.0}, {2: 1.0}) for value in odds)


def simulated(rng):
    """Two independent observers of the same hidden fact; returns their probabilities, and the exact one given both."""
    is_right = rng.random() < 0.5
    reports = [is_right if rng.random() < share else not is_right for share in (0.8, 0.7)]
    first, second = (share if said else 1 - share for said, share in zip(reports, (0.8, 0.7), strict=True))
    exact = first * second / (first * second + (1 - first) * (1 - second))
    return first, second, exact, is_right


def test_the_weights_find_the_exact_posterior_of_two_independent_predictors():
    """Bayes adds their log-odds: weights of one, which an average of the probabilities cannot express."""
    rng, mixer, errors = random.Random(0), LogisticMixer(), []
    for _ in range(6000):
        first, second, exact, is_right = simulated(rng)
        ((_, evidence),) = combine({1: first}, {1: second})
        errors.append(abs(mixer.probability(evidence) - exact))
        mixer.learn(evidence, is_right)
    assert sum(errors[:100]) / 100 > 0.05
    assert sum(errors[-2000:]) / 2000 < 0.025


def test_a_predictor_that_is_right_less_often_than_it_says_is_believed_less():
    rng, mixer = random.Random(0), LogisticMixer()
    ((_, evidence),) = combine({}, {1: 0.9})
    for _ in range(4000):
        mixer.learn(evidence, rng.random() < 0.3)
    assert mixer.probability(evidence) == pytest.approx(0.3, abs=0.05)


def test_more_confidence_never_lowers_the_probability_whatever_was_learned():
    rng, mixer = random.Random(0), LogisticMixer()
    for _ in range(3000):
        ((_, evidence),) = combine({1: rng.random()}, {1: rng.random()})
        mixer.learn(evidence, evidence.first < 0 and rng.random() < 0.5)  # the confident one is always wrong
    for second in (0.1, 0.5, 0.9):
        rising = [mixer.probability(combine({1: first / 20}, {1: second})[0][1]) for first in range(21)]
        assert rising == sorted(rising)
