"""Bayesian optimisation of a skip set: a Gaussian process over the sets and its expected improvement."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from inference.tuning.local_search import SkipSet

NUM_RANDOM_SETS = 5  # scored before the first model is fitted
MAX_CANDIDATES = 512  # sets whose improvement is estimated before each evaluation
NOISE = 1e-2  # variance of the noise of a score, relative to the variance of the scores


def bayesian_search(
    score: Callable[[SkipSet], float], num_sublayers: int, starts: Sequence[SkipSet], evaluations: int, seed: int = 0
) -> SkipSet:
    """Return the skip set with the highest score found by Bayesian optimisation (Draft & Verify, section 3.3).

    A Gaussian process is fitted to the scores so far; the covariance of two sets falls exponentially with the number of
    sublayers in which they differ. Of the candidates, which are random sets and the best set with one to three changes,
    the one with the largest expected improvement is scored next. The same arguments give the same search.

    Args:
        score: Score of a set; higher is better. It may be noisy.
        num_sublayers: Number of sublayers, 2L.
        starts: Sets that are scored first.
        evaluations: Maximum number of distinct sets to score.
        seed: Seed of the random sets.
    """
    rng = random.Random(seed)
    scores: dict[SkipSet, float] = {}

    def random_set() -> SkipSet:
        return frozenset(sublayer for sublayer in range(num_sublayers) if rng.random() < 0.5)

    def candidates() -> list[SkipSet]:
        best = max(scores, key=scores.__getitem__)
        sizes = [size for size in (1, 2, 3) if size <= num_sublayers]
        near = [
            best ^ frozenset(rng.sample(range(num_sublayers), rng.choice(sizes))) for _ in range(MAX_CANDIDATES // 2)
        ]
        return [*near, *(random_set() for _ in range(MAX_CANDIDATES // 2))]

    for skips in dict.fromkeys([*starts, *(random_set() for _ in range(NUM_RANDOM_SETS))]):
        if len(scores) < evaluations:
            scores[skips] = score(skips)
    while len(scores) < min(evaluations, 2**num_sublayers):
        unknown = [skips for skips in dict.fromkeys(candidates()) if skips not in scores]
        if unknown:
            gains = expected_improvement(list(scores), list(scores.values()), unknown, num_sublayers)
            skips = unknown[int(gains.argmax())]
            scores[skips] = score(skips)
    return max(scores, key=scores.__getitem__)


def expected_improvement(
    known: Sequence[SkipSet], scores: Sequence[float], candidates: Sequence[SkipSet], num_sublayers: int
) -> np.ndarray:
    """Expected improvement of candidates over the best known score, in standard deviations of the scores.

    Args:
        known: N sets.
        scores: Their scores.
        candidates: C sets.
        num_sublayers: Number of sublayers.

    Returns:
        (C,) float64.
    """
    from scipy.stats import norm

    known_bits, candidate_bits = (
        np.array([[sublayer in skips for sublayer in range(num_sublayers)] for skips in sets], dtype=float)
        for sets in (known, candidates)
    )
    values = np.asarray(scores)
    values = (values - values.mean()) / (values.std() or 1.0)
    covariance = _kernel(known_bits, known_bits) + NOISE * np.eye(len(known))
    between = _kernel(candidate_bits, known_bits)  # (C, N)
    weights = np.linalg.solve(covariance, between.T)  # (N, C)
    mean = values @ weights
    deviation = np.sqrt((1 - (between.T * weights).sum(0)).clip(min=1e-12))
    margin = mean - values.max()
    return deviation * norm.pdf(margin / deviation) + margin * norm.cdf(margin / deviation)


def _kernel(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Covariances (N, M) of sets given as bits (N, 2L) and (M, 2L)."""
    num_differences = np.abs(left[:, None] - right[None]).sum(-1)
    return np.exp(-num_differences / (left.shape[1] / 4))
