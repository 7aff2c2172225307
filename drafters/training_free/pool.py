"""The n-gram pool of lookahead decoding, Self-Draft and Ouroboros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NgramPool:
    """The n-grams that followed each key token, in the order of their last insertion.

    Args:
        max_per_key: Number of n-grams kept per key; beyond it the oldest is dropped. 0 keeps all.
    """

    def __init__(self, max_per_key: int = 0) -> None:
        self.max_per_key = max_per_key
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        """Return the number of n-grams over all keys."""
        return sum(map(len, self._grams.values()))

    def insert(self, key: int, gram: Sequence[int]) -> None:
        """Add an n-gram as the newest of its key; one that is there already is moved."""
        grams = self._grams.setdefault(key, {})
        new = tuple(gram)
        grams.pop(new, None)
        grams[new] = None
        if self.max_per_key and len(grams) > self.max_per_key:
            del grams[next(iter(grams))]

    def newest(self, key: int, count: int | None = None) -> list[tuple[int, ...]]:
        """Return the newest ``count`` n-grams of a key, or all, from the oldest to the newest."""
        grams = list(self._grams.get(key, ()))
        return grams if count is None else grams[max(0, len(grams) - count) :]

    def replace_newest(self, key: int, grams: Iterable[Sequence[int]]) -> None:
        """Replace the newest n-grams of a key by as many others."""
        grams = list(grams)
        for old in self.newest(key, len(grams)):
            del self._grams[key][old]
        for gram in grams:
            self.insert(key, gram)

    def keep_newest(self, count: int) -> None:
        """Drop all but the newest ``count`` n-grams of every key."""
        for key in self._grams:
            self._grams[key] = dict.fromkeys(self.newest(key, count))

    def clear(self) -> None:
        """Drop all n-grams."""
        self._grams.clear()
