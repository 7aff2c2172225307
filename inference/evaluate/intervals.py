"""Uncertainty of measured numbers: confidence intervals over the questions, and the deviation between runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy import stats

RESAMPLES = 2000
PUBLISHED_LEVEL = 0.95  # of the intervals in results
MIN_IN_TAIL = 5  # resamples beyond an end of an interval; with fewer, a log-normal distribution gives the end
TOLERANCE = 1e-12  # relative difference of numbers that are equal except for rounding

# What a file may hold: True is no number, and neither is NaN.
Count = Annotated[int, Field(strict=True, ge=0)]
Figure = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Interval = tuple[Figure, Figure]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % confidence interval over the questions; what is unknown is None."""

    value: Figure | None
    interval: Interval | None = None


UNKNOWN = Estimate(None)


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient of two numbers; None if one is unknown or the denominator is 0."""
    return numerator / denominator if numerator is not None and denominator else None


def ratio(terms: Iterable[tuple[float, float]]) -> Estimate:
    """The ratio of two sums over questions, each of which has a term of both; without a value if there are none."""
    columns = list(zip(*terms, strict=True))
    if not columns or not sum(columns[1]):
        return UNKNOWN
    return Estimate(sum(columns[0]) / sum(columns[1]), interval(columns, (1, -1)))


def interval(
    columns: Sequence[Sequence[float]], powers: Sequence[int], level: float = PUBLISHED_LEVEL
) -> Interval | None:
    """Confidence interval of a product of powers of sums over questions, such as a ratio of two sums.

    It is an expanded percentile bootstrap over the questions (Hesterberg, The American Statistician 69, 2015, section
    4): plain percentiles are too narrow for few questions, so they are moved outwards to those of Student's t
    distribution. On synthetic answers to 20 to 80 questions a 95 % interval contains the true value in 92 to 95 % of
    cases (plain percentiles: 89 to 94 %). Below ten questions, or if few questions differ from the rest, it is too
    narrow.

    The ``columns`` are the terms of K sums, one for each of n questions. Each sum is raised to its power: (1, -1) gives
    the ratio of two. The result is None for fewer than two questions, or if a sum is not positive.
    """
    terms = np.asarray(columns, dtype=float).T  # (n, K)
    exponents = np.asarray(powers, dtype=float)
    num_questions = len(terms)
    if num_questions < 2 or (terms.sum(axis=0) <= 0).any():
        return None
    sums = _resamples(num_questions) @ terms  # (RESAMPLES, K)
    is_defined = (sums[:, exponents < 0] > 0).all(axis=1)  # a numerator may be zero, where few questions count for it
    samples = np.prod(sums[is_defined] ** exponents, axis=1)
    tail = tail_probability(num_questions, level)
    low, high = np.quantile(samples, [tail, 1 - tail])
    if level > PUBLISHED_LEVEL and tail * len(samples) < MIN_IN_TAIL:  # further out than the resamples reach
        logarithms = np.log(samples[samples > 0])
        middle, width = logarithms.mean(), stats.norm.isf(tail) * logarithms.std()
        low, high = (np.exp(middle - width) if low > 0 else 0.0), np.exp(middle + width)
    if high - low <= TOLERANCE * abs(low):
        low = high = float(np.prod(terms.sum(axis=0) ** exponents))
    return float(low), float(high)


@lru_cache(maxsize=4)  # a report has many intervals over the same questions
def _resamples(num_questions: int) -> np.ndarray:
    """How often each question is drawn in each resample: (RESAMPLES, n), the same for all intervals."""
    shares = np.full(num_questions, 1 / num_questions)
    return np.random.default_rng(0).multinomial(num_questions, shares, size=RESAMPLES).astype(float)


def tail_probability(num_questions: int, level: float) -> float:
    """Probability outside of each end of the bootstrap interval.

    A normal distribution with the bootstrap's standard deviation, which is too small by sqrt((n - 1) / n), has this
    probability beyond the quantile of Student's t distribution.
    """
    quantile = stats.t.ppf((1 + level) / 2, num_questions - 1)
    return float(stats.norm.cdf(-sqrt(num_questions / (num_questions - 1)) * quantile))


def half_width(groups: Sequence[Sequence[float]]) -> float | None:
    """Half-width of the 95 % confidence interval of the mean of values, each of which is its group's mean and an error.

    The errors are those within the groups; if no group has two values, all values count as one group.

    >>> round(half_width([[0.9, 1.1], [2.9, 3.1]]), 3)
    0.304
    """
    repeated = [group for group in groups if len(group) > 1] or [[value for group in groups for value in group]]
    count, freedom = sum(map(len, repeated)), sum(len(group) - 1 for group in repeated)
    if freedom < 1:
        return None
    variance = sum(float(np.sum((np.asarray(group) - np.mean(group)) ** 2)) for group in repeated) / freedom
    return float(stats.t.ppf((1 + PUBLISHED_LEVEL) / 2, freedom)) * sqrt(variance / count)
