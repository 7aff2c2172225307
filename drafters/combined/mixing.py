"""Logistic mixing: one probability from those of two predictors, with weights that are learned online."""

from __future__ import annotations

from enum import IntEnum
from math import exp, log
from typing import NamedTuple

MIN_PROBABILITY = 1e-3
LEARNING_RATE = 0.02


class Agreement(IntEnum):
    """Which of two predictors name a token; each case has weights of its own."""

    BOTH = 0
    FIRST = 1  # the second names other tokens
    SECOND = 2  # the first names other tokens
    FIRST_ALONE = 3  # the second names no token
    SECOND_ALONE = 4


FIRST_WEIGHTS = {  # of the first and the second predictor, and the bias; what a CTC drafter and n-grams have learned
    Agreement.BOTH: (1.0, 0.4, 1.2),
    Agreement.FIRST: (1.3, 0.3, 0.0),
    Agreement.SECOND: (0.7, 1.1, -0.8),
    Agreement.FIRST_ALONE: (1.0, 0.0, 0.0),
    Agreement.SECOND_ALONE: (0.0, 1.0, 0.0),
}


class Evidence(NamedTuple):
    """What two predictors say about a token, as log-odds.

    Args:
        agreement: Which of them name it.
        first: Log-odds of the first predictor; 0 if it names no token.
        second: Log-odds of the second predictor; 0 if it names no token.
    """

    agreement: Agreement
    first: float
    second: float


class LogisticMixer:
    """The probability of a token from the log-odds of two predictors, by logistic regression (Mahoney 2005, PAQ).

    Two predictors that agree are more often right than each of them, which no average of their probabilities says. The
    weights follow what proved right, by one gradient step of the cross-entropy for each judged token.
    """

    def __init__(self) -> None:
        self._weights = [list(FIRST_WEIGHTS[agreement]) for agreement in Agreement]

    def probability(self, evidence: Evidence) -> float:
        """The probability that the token comes next, between 0 and 1."""
        first, second, bias = self._weights[evidence.agreement]
        return 1 / (1 + exp(-(first * evidence.first + second * evidence.second + bias)))

    def learn(self, evidence: Evidence, is_right: bool) -> None:
        """Move the weights towards what was right.

        More confidence of a predictor never lowers the probability: weights do not fall below 0.
        """
        step = LEARNING_RATE * (is_right - self.probability(evidence))
        weights = self._weights[evidence.agreement]
        weights[0] = max(0.0, weights[0] + step * evidence.first)
        weights[1] = max(0.0, weights[1] + step * evidence.second)
        weights[2] += step


def log_odds(probability: float) -> float:
    """The log-odds of a probability, which is limited to be neither 0 nor 1.

    >>> log_odds(0.5)
    0.0
    """
    probability = min(max(probability, MIN_PROBABILITY), 1 - MIN_PROBABILITY)
    return log(probability / (1 - probability))


def combine(first: dict[int, float], second: dict[int, float]) -> list[tuple[int, Evidence]]:
    """What two predictors say about each token that either of them names.

    Where a predictor names other tokens only, it gives the token what they leave.

    Args:
        first: Probabilities of the next token, which add up to at most one; empty if nothing is known.
        second: The same of the other predictor.
    """
    pairs = []
    first_left, second_left = (log_odds(1 - sum(each.values())) if each else 0.0 for each in (first, second))
    for token, probability in first.items():
        odds = log_odds(probability)
        if token in second:
            pairs.append((token, Evidence(Agreement.BOTH, odds, log_odds(second[token]))))
        else:
            agreement = Agreement.FIRST if second else Agreement.FIRST_ALONE
            pairs.append((token, Evidence(agreement, odds, second_left)))
    agreement = Agreement.SECOND if first else Agreement.SECOND_ALONE
    for token, probability in second.items():
        if token not in first:
            pairs.append((token, Evidence(agreement, first_left, log_odds(probability))))
    return pairs
