"""Splits rows into batches that hold at most a given number of tokens, padding included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

CLASSES_PER_OCTAVE = 12  # lengths within one class differ by at most 6 %


class TokenBudget:
    """Splits rows into batches under a token budget. Every order of the rows gives batches of the same sizes.

    Rows are sorted into classes of similar length, longest class first, and keep their given order within a class. When
    the batch sizes are planned, each row counts as long as the longest row of the longest class in its batch, so the
    batch fits no matter which rows of those classes end up in it.

    Args:
        lengths: Number of tokens of each row.
        batch_size: Largest number of rows per batch and rank.
        max_tokens: Largest number of tokens per batch and rank, padding included.
        world_size: Number of ranks. Every rank takes the same number of rows of a batch.

    Raises:
        ValueError: A single row is longer than `max_tokens`.
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
        self.sizes: list[int] = []  # number of rows of each batch, over all ranks
        first = 0
        while first < len(rows):
            rows_per_rank = min(batch_size, max_tokens // longest[self.classes[rows[first]]])
            self.sizes.append(min(rows_per_rank * world_size, len(rows) - first))
            first += self.sizes[-1]

    def cut(self, rows: Sequence[int]) -> list[list[int]]:
        """Split an order of all rows into batches over all ranks, with the longest rows in the last batches."""
        rows = self._in_classes(rows)
        return [rows[first:end] for first, end in pairwise(accumulate(self.sizes, initial=0))][::-1]

    def _in_classes(self, rows: Sequence[int]) -> list[int]:
        """Sort rows by class, longest first, and repeat the shortest until the ranks have equally many rows."""
        ordered = sorted(rows, key=self.classes.__getitem__, reverse=True)
        repeated = [ordered[-1 - place % len(ordered)] for place in range(-len(ordered) % self.world_size)]
        return sorted(ordered + repeated, key=self.classes.__getitem__, reverse=True)
