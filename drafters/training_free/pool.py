"""The n-gram pool that lookahead decoding, Self-Draft and Ouroboros share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NgramPool:
    """For each key token the token tuples that followed it, oldest first; inserting one again makes it the newest.

    Args:
        most: Tuples kept for a key; the oldest goes first. 0 keeps all.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        """Tuples held, over all keys."""
        return sum(map(len, self._grams.values()))

    def insert(self, key: int, gram: Sequence[int]) -> None:
        """Add a tuple, or make it the newest of its key."""
        grams = self._grams.setdefault(key, {})
        gram = tuple(gram)
        grams.pop(gram, None)
        grams[gram] = None
        if self.most and len(grams) > self.most:
            del grams[next(iter(grams))]

    def newest(self, key: int, count: int | None = None) -> list[tuple[int, ...]]:
        """The newest ``count`` tuples of a key, or all, oldest of them first. Asking does not refresh them."""
        grams = list(self._grams.get(key, ()))
        return grams if count is None else grams[max(0, len(grams) - count) :]

    def replace_newest(self, key: int, grams: Iterable[Sequence[int]]) -> None:
        """Put these in the place of the newest ones of the key, as many as they are."""
        grams = list(grams)
        for old in self.newest(key, len(grams)):
            del self._grams[key][old]
        for gram in grams:
            self.insert(key, gram)

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest ``count`` tuples of every key."""
        for key in self._grams:
            self._grams[key] = dict.fromkeys(self.newest(key, count))

    def clear(self) -> None:
        """Forget everything."""
        self._grams.clear()
