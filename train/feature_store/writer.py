"""Writes the shards of a feature store: runs the base over conversations, and says before how long that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from data.feature_store.shards import KEY_BYTES, Shard, write_shard
from data.feature_store.store import Manifest
from inference.engine.base import Base
from train.feature_store.base_features import extract_features

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLED = (0.5, 0.1, 0.9)  # shares of the rows still to be written at which the time is measured
SAMPLE = "sample.new"


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def estimated_seconds(
    base: Base,
    rows: Dataset,
    todo: list[int],
    sizes: Sequence[int],
    manifest: Manifest,
    batch_size: int,
    folder: Path,
) -> float:
    """Time to write rows, by the time a few batches of them take with a file of their own on the same disk."""
    tokens, seconds = 0, 0.0
    for share in SAMPLED if len(todo) > 8 * batch_size else SAMPLED[:1]:
        first = int(share * max(0, len(todo) - batch_size))
        some = todo[first : first + batch_size]
        if not tokens:
            list(said(base, rows, some[:1], manifest.layers, 1))  # the first forward is slower than the others
        start = time.monotonic()
        texts = said(base, rows, some, manifest.layers, batch_size)
        names = [bytes(KEY_BYTES)] * len(some)
        write_shard(folder / SAMPLE, names, texts, manifest.layers, manifest.dtype)
        seconds += time.monotonic() - start
        (folder / SAMPLE).unlink()
        tokens += sum(sizes[row] for row in some)
    return seconds / tokens * sum(sizes[row] for row in todo)


def said(
    base: Base, rows: Dataset, members: Sequence[int], layers: Sequence[int], batch_size: int
) -> Iterator[dict[str, Any]]:
    """What `write_shard` takes: each of some rows with what the base says about it."""
    device = base.model.device
    for start in range(0, len(members), batch_size):
        texts = [rows[row] for row in members[start : start + batch_size]]
        ids = [torch.tensor(text["input_ids"]) for text in texts]
        hidden, _, labels = extract_features(base, layers, pad_sequence(ids, batch_first=True).to(device))
        for text, tokens, states, said_next in zip(texts, ids, hidden, labels, strict=True):
            yield {
                "id": text["id"],
                "input_ids": tokens,
                "loss_mask": torch.tensor(text["loss_mask"]),
                "hidden": states[: len(tokens)],
                "labels": said_next[: len(tokens)],
            }


def write(
    base: Base,
    rows: Dataset,
    names: Sequence[bytes],
    missing: dict[int, list[int]],
    manifest: Manifest,
    there: dict[str, Shard],
    batch_size: int,
    folder: Path,
) -> None:
    """Write the missing shards one by one; after each the manifest knows of it."""

    def saved(is_complete: bool) -> None:
        shards = tuple(shard for _, shard in sorted(there.items()))
        replace(manifest, shards=shards, is_complete=is_complete).save(folder)

    if missing:
        saved(is_complete=False)
    with tqdm(total=sum(map(len, missing.values())), unit=" conversations", disable=None) as bar:
        for number, members in missing.items():

            def counted(members: Sequence[int] = members) -> Iterator[dict[str, Any]]:
                for text in said(base, rows, members, manifest.layers, batch_size):
                    yield text
                    bar.update()

            path = folder / shard_name(number)
            there[path.name] = write_shard(
                path, [names[row] for row in members], counted(), manifest.layers, manifest.dtype
            )
            saved(is_complete=False)
    saved(is_complete=True)
