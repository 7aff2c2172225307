"""What steps take by the number of tokens they feed, learned from noisy durations."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

# Numbers of nodes that are tried.
SIZES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
NUM_KEPT = 64  # durations kept of each size


class CostCurve:
    """Seconds of a step by its size, learned from noisy durations.

    Args:
        expected: Seconds of steps of size 0, 1, 2, ... as measured elsewhere; empty if nothing is known. Only their
            ratios count once something is measured here.
    """

    def __init__(self, expected: Sequence[float] = ()) -> None:
        self.expected = expected
        self._durations: dict[int, deque[float]] = {}
        self._estimates: dict[int, float] = {}
        self._changed: set[int] = set()

    def add(self, size: int, seconds: float) -> None:
        """Add the duration of a step."""
        if size > 16:
            size = min(SIZES, key=lambda known: abs(known - size))
        if size not in self._durations:
            self._durations[size] = deque(maxlen=NUM_KEPT)
        self._durations[size].append(seconds)
        self._changed.add(size)

    def charged(self, size: int, seconds: float) -> float:
        """What a duration counts in the account: at most twice what nine of ten durations of this size stay below."""
        kept = sorted(self._durations.get(size, ()))
        return min(seconds, 2 * kept[len(kept) * 9 // 10]) if len(kept) >= 8 else seconds

    def count(self, size: int) -> int:
        """Number of durations kept of a size."""
        return len(self._durations.get(size, ()))

    def largest(self) -> int:
        """The largest size that was measured at least twice, else 0."""
        return max((size for size, kept in self._durations.items() if len(kept) > 1), default=0)

    @property
    def knows_vanilla(self) -> bool:
        """Whether anything is known about steps of size 0."""
        return bool(self.expected) or 0 in self._durations

    def seconds(self) -> list[float]:
        """The seconds of each of `SIZES`.

        Those of a size that was not measured are continued from the smaller ones with their mean slope, or interpolated
        if that is less: a low estimate, too. If seconds are expected, it is how far they are off that is interpolated.
        """
        for size in self._changed:
            self._estimates[size] = estimate(self._durations[size])
        self._changed.clear()
        # One duration alone may be an outlier.
        known = sorted(size for size in self._estimates if self.count(size) > 1)
        if self.expected:
            places = np.arange(len(self.expected))
            ratios = [self._estimates[size] / float(np.interp(size, places, self.expected)) for size in known] or [1.0]
            return (np.interp(SIZES, known or [0], ratios) * np.interp(SIZES, places, self.expected)).tolist()
        known = known or sorted(self._estimates)
        if not known:
            return [0.0] * len(SIZES)
        values = [self._estimates[size] for size in known]
        below = np.searchsorted(known, SIZES, side="right").clip(1) - 1  # the next smaller measured size
        start, lowest = np.array(known)[below], np.array(values)[below]
        slopes = np.maximum(0, lowest - values[0]) / np.maximum(1, start - known[0])
        continued = lowest + slopes * np.maximum(0, np.array(SIZES) - start)
        return np.minimum(continued, np.interp(SIZES, known, values, right=np.inf)).tolist()


def estimate(durations: Collection[float]) -> float:
    """A low estimate of the typical duration, whatever the outliers; with few durations it is lower.

    It is the mean of the middle half, less its standard error, or the shortest of fewer than four. So sizes that are
    hardly known are tried rather than avoided.
    """
    if len(durations) < 4:
        return min(durations)
    cut = len(durations) // 4
    middle = sorted(durations)[cut : len(durations) - cut]
    return sum(middle) / len(middle) - (middle[-1] - middle[0]) / 2 / len(durations) ** 0.5
