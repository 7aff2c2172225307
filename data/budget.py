"""A token budget: rows of similar length cut into batches that hold no more padded tokens than a device takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

CLASSES_PER_OCTAVE = 12  # rows of one class differ in length by 6 % at most


class TokenBudget:
    """Cuts any order of the rows into batches whose number and sizes are the same for every order.

    Rows are put into classes of similar length, longest first, and keep their order within a class. A batch counts
    all its rows as long as the longest row of its longest class; so whichever of them an order puts there, they fit.

    Args:
        lengths: number of tokens of each row.
        batch_size: rows a batch and rank at most.
        max_tokens: tokens a batch and rank at most, padding among them.
        world_size: number of ranks; each takes equally many rows of a batch.

    Raises:
        ValueError: a row alone is longer than `max_tokens`.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, max_tokens: int, world_size: int = 1) -> None:
        if max_tokens < max(lengths):
            raise ValueError(
                f"data.max_tokens is {max_tokens}, but the longest conversation has {max(lengths)} tokens: "
                "raise it, or lower data.max_length"
            )
        self.world_size = world_size
        self.classes = [math.floor(CLASSES_PER_OCTAVE * math.log2(max(1, length))) for length in lengths]
        longest: dict[int, int] = {}
        for length, of_class in zip(lengths, self.classes, strict=True):
            longest[of_class] = max(length, longest.get(of_class, 1))
        rows = self._in_classes(range(len(lengths)))
        self.sizes: list[int] = []  # rows of each batch, all ranks together
        first = 0
        while first < len(rows):
            most = min(batch_size, max_tokens // longest[self.classes[rows[first]]])
            self.sizes.append(min(most * world_size, len(rows) - first))
            first += self.sizes[-1]

    def cut(self, rows: Sequence[int]) -> list[list[int]]:
        """The batches of all ranks together, from an order of all rows; the longest rows come last."""
        rows = self._in_classes(rows)
        return [rows[first:end] for first, end in pairwise(accumulate(self.sizes, initial=0))][::-1]

    def _in_classes(self, rows: Sequence[int]) -> list[int]:
        """Longest class first; the shortest rows come again until each rank has equally many."""
        ordered = sorted(rows, key=self.classes.__getitem__, reverse=True)
        again = [ordered[-1 - place % len(ordered)] for place in range(-len(ordered) % self.world_size)]
        return sorted(ordered + again, key=self.classes.__getitem__, reverse=True)
