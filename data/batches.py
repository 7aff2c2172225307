"""Pads rows into batches and groups rows of similar length, in a reproducible order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Rows of this many batches are sorted by length together: few enough to shuffle well, enough to need little padding.
BATCHES_PER_BUCKET = 50
CLASSES_PER_OCTAVE = 12  # lengths within one class differ by at most 6 %


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad rows of a tokenised data set or of a feature store on the right with zeros, and stack them.

    Returns ``input_ids`` (B, S) int64, ``loss_mask`` (B, S) bool and ``lengths`` (B,) int64. Rows from a feature store
    add ``labels`` (B, S) int64 and the hidden states (B, S, ...) in the dtype of the store.
    """
    ids = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    masks = [torch.as_tensor(row["loss_mask"], dtype=torch.bool) for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "loss_mask": pad_sequence(masks, batch_first=True, padding_value=False),
        "lengths": torch.tensor([len(row) for row in ids]),
    }
    for name in [name for name in rows[0] if name not in ("id", *batch)]:
        batch[name] = pad_sequence([row[name] for row in rows], batch_first=True)
    if "labels" in batch:
        batch["labels"] = batch["labels"].long()
    return batch


@dataclass(eq=False)
class BucketSampler:
    """Batch sampler that groups rows of similar length and splits every batch over the ranks.

    The order depends only on the seed and the epoch. No row is dropped: rows are repeated until every rank has the same
    number of batches of the same size. Every epoch has the same number of batches, because Lightning asks only once.
    """

    lengths: Sequence[int]  # number of tokens of each row
    batch_size: int  # largest number of rows per batch and rank
    seed: int = 0
    rank: int = 0  # of this process
    world_size: int = 1  # number of ranks
    is_shuffled: bool = True  # if false, every epoch has the same order, with the longest rows last
    max_tokens: int | None = None  # largest number of tokens per batch and rank, padding included

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size is {self.batch_size}: a batch has at least 1 conversation")
        self.budget: TokenBudget | None = None
        if self.max_tokens is not None:
            self.budget = TokenBudget(self.lengths, self.batch_size, self.max_tokens, self.world_size)
        self.epoch = 0
        self.start = 0  # number of batches to skip at the next iteration, set when a run resumes inside an epoch
        self.sampler = self  # Lightning calls set_epoch on `batch_sampler.sampler`, not on a batch sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.budget:
            return len(self.budget.sizes)
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        yield from [batch[self.rank :: self.world_size] for batch in self._batches()[start:]]

    def padding_share(self) -> float:
        """Return the fraction of padding among the tokens of an epoch, over all ranks."""
        per_rank = [batch[rank :: self.world_size] for batch in self._batches() for rank in range(self.world_size)]
        sizes = [[self.lengths[row] for row in rows] for rows in per_rank]
        return 1 - sum(map(sum, sizes)) / sum(max(batch) * len(batch) for batch in sizes)

    def _batches(self) -> list[list[int]]:
        """Return the batches of all ranks together; each rank takes every `world_size`-th row of a batch."""
        rng = random.Random(f"{self.seed} {self.epoch}" if self.is_shuffled else "")
        rows = list(range(len(self.lengths)))
        if self.is_shuffled:
            rng.shuffle(rows)
        batches = self.budget.cut(rows) if self.budget else self._in_buckets(rows)
        if self.is_shuffled:
            rng.shuffle(batches)
        return batches

    def _in_buckets(self, rows: list[int]) -> list[list[int]]:
        rows = rows + (rows * self.world_size)[: -len(rows) % self.world_size]
        size = self.batch_size * self.world_size
        bucket = size * BATCHES_PER_BUCKET if self.is_shuffled else len(rows)
        batches = []
        for first in range(0, len(rows), bucket):
            by_length = sorted(rows[first : first + bucket], key=lambda row: self.lengths[row])
            batches += [by_length[n : n + size] for n in range(0, len(by_length), size)]
        return batches


class TokenBudget:
    """Splits rows into batches under a token budget. Every order of the rows gives batches of the same sizes.

    Rows are sorted into classes of similar length, longest class first, and keep their given order within a class. When
    the batch sizes are planned, each row counts as long as the longest row of the longest class in its batch, so the
    batch fits no matter which rows of those classes end up in it. The arguments are those of `BucketSampler`.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, max_tokens: int, world_size: int) -> None:
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
