"""Rows made into padded batches, and the order in which batches come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from data.budget import TokenBudget

if TYPE_CHECKING:
    from torch import Tensor

BATCHES_PER_BUCKET = 50  # rows of this many batches are sorted by length together: little padding, much shuffling


def collate(rows: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Pad rows on the right.

    Returns:
        input_ids (B, S) int64, loss_mask (B, S) bool, lengths (B,) int64; of rows from a feature store also labels
        (B, S) int64, and states (B, S, ...) as they are stored, zero at the padding.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    masks = [torch.as_tensor(row["loss_mask"], dtype=torch.bool) for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "loss_mask": pad_sequence(masks, batch_first=True, padding_value=False),
        "lengths": torch.tensor([len(row) for row in ids]),
    }
    for name in [name for name in rows[0] if name not in ("id", *batch)]:
        batch[name] = pad_sequence([row[name] for row in rows], batch_first=True)
    if "labels" in batch:
        batch["labels"] = batch["labels"].long()
    return batch


class BucketSampler:
    """Batches of rows of similar length, in an order that depends on seed and epoch only, shared out over the ranks.

    No row is dropped: the order is padded by wrapping to a multiple of the number of ranks, so that all have equally
    many batches of equal size. All epochs have equally many: Lightning asks for their number once.

    Args:
        lengths: number of tokens of each row.
        batch_size: rows a batch and rank at most.
        seed: of the order.
        rank: which share is ours.
        world_size: number of ranks.
        is_shuffled: False keeps one order for all epochs, the longest rows last.
        max_tokens: tokens a batch and rank at most, padding among them; None for no such limit.

    Raises:
        ValueError: `batch_size` is below 1, or a row alone is longer than `max_tokens`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        is_shuffled: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"data.batch_size is {batch_size}: a batch has at least 1 conversation")
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.is_shuffled = is_shuffled
        self.budget = TokenBudget(lengths, batch_size, max_tokens, world_size) if max_tokens is not None else None
        self.epoch = 0
        self.start = 0  # batches of the next epoch to skip: set when a run resumes in its middle
        self.sampler = self  # Lightning calls set_epoch on `batch_sampler.sampler`, not on a batch sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.budget:
            return len(self.budget.sizes)
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        yield from [batch[self.rank :: self.world_size] for batch in self._batches()[start:]]

    def padding_share(self) -> float:
        """Share of the padding among all tokens of an epoch's batches, on all ranks."""
        held = [batch[rank :: self.world_size] for batch in self._batches() for rank in range(self.world_size)]
        sizes = [[self.lengths[row] for row in rows] for rows in held]
        return 1 - sum(map(sum, sizes)) / sum(max(each) * len(each) for each in sizes)

    def _batches(self) -> list[list[int]]:
        """Order the rows into batches of all ranks together: a rank takes every `world_size`-th row of each."""
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
