"""Writes the shards of a feature store by running the base over conversations, and estimates how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from data.feature_store.shards import KEY_BYTES, Shard, write_shard
from inference.runs import progress_bars
from inference.verifier.base import Base
from train.feature_store.base_features import compute_features
from train.feature_store.plan import Plan, Texts, shard_name

# Where batches are timed, as shares of the rows to write: rows are sorted by length, and the first is a warm-up.
TIMED_PLACES = (0.5, 0.1, 0.9)
TIMED_FILE = "sample.new"


@dataclass(frozen=True)
class StoreWriter:
    """Runs the base over conversations and writes what it returns.

    Args:
        base: The base.
        texts: The conversations.
        plan: What is to be written.
        batch_size: Conversations per forward pass.
    """

    base: Base
    texts: Texts
    plan: Plan
    batch_size: int

    def estimate_seconds(self) -> float:
        """Return the time to write the missing rows, by writing a few batches of them to a file of their own."""
        rows = self.plan.missing_rows
        manifest, path = self.plan.manifest, self.plan.folder / TIMED_FILE
        list(self.compute(rows[:1]))  # the first forward pass is slower than the others
        num_tokens, seconds = 0, 0.0
        for place in TIMED_PLACES if len(rows) > 8 * self.batch_size else TIMED_PLACES[:1]:
            first = int(place * max(0, len(rows) - self.batch_size))
            timed_rows = rows[first : first + self.batch_size]
            start = time.monotonic()
            names = [bytes(KEY_BYTES)] * len(timed_rows)
            write_shard(path, names, self.compute(timed_rows), manifest.layers, manifest.dtype)
            seconds += time.monotonic() - start
            path.unlink()
            num_tokens += self.texts.num_tokens(timed_rows)
        return seconds / num_tokens * self.texts.num_tokens(rows)

    def compute(self, rows: Sequence[int], advance: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """Yield for each row what `write_shard` writes: its tokens, loss mask, hidden states and labels.

        Args:
            rows: Row numbers.
            advance: Called after each row.
        """
        for start in range(0, len(rows), self.batch_size):
            texts = [self.texts.rows[row] for row in rows[start : start + self.batch_size]]
            ids = [torch.tensor(text["input_ids"]) for text in texts]
            padded = pad_sequence(ids, batch_first=True).to(self.base.model.device)
            outputs = compute_features(self.base, self.plan.manifest.layers, padded)
            for text, tokens, states, labels in zip(texts, ids, outputs.hidden, outputs.labels, strict=True):
                yield {
                    "id": text["id"],
                    "input_ids": tokens,
                    "loss_mask": torch.tensor(text["loss_mask"]),
                    "hidden": states[: len(tokens)],
                    "labels": labels[: len(tokens)],
                }
                advance()

    def write_missing_shards(self) -> None:
        """Write the missing shards one by one, and update the manifest after each of them."""
        manifest, written = self.plan.manifest, dict(self.plan.written)
        if self.plan.missing:
            self._save_manifest(written, is_complete=False)
        with progress_bars() as bars:
            task = bars.add_task("conversations", total=len(self.plan.missing_rows))
            for number, rows in self.plan.missing.items():
                path = self.plan.folder / shard_name(number)
                names = [self.texts.keys[row] for row in rows]
                states = self.compute(rows, advance=lambda: bars.advance(task))
                written[path.name] = write_shard(path, names, states, manifest.layers, manifest.dtype)
                self._save_manifest(written, is_complete=False)
        self._save_manifest(written, is_complete=True)

    def _save_manifest(self, written: dict[str, Shard], is_complete: bool) -> None:
        shards = tuple(shard for _, shard in sorted(written.items()))
        replace(self.plan.manifest, shards=shards, is_complete=is_complete).save(self.plan.folder)
