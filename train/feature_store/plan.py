"""Which conversations each shard of a feature store holds, and which shards are still to be written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from data.feature_store.shards import BYTES_PER_ROW, Shard, bytes_per_token, checksum, row_keys
from data.feature_store.store import LAST_HIDDEN, MANIFEST, Manifest, differing_settings
from data.sharegpt import lengths
from inference.runs import folder_above

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Texts:
    """Tokenised conversations.

    Args:
        rows: The conversations.
        keys: Key of each conversation in a store: a hash of its tokens and its loss mask.
        lengths: Number of tokens of each conversation.
    """

    rows: Dataset
    keys: Sequence[bytes]
    lengths: Sequence[int]

    @classmethod
    def of(cls, rows: Dataset) -> Texts:
        return cls(rows, row_keys(rows), lengths(rows))

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of some conversations."""
        return sum(self.lengths[row] for row in rows)


@dataclass(frozen=True)
class Plan:
    """A store with some shards written and others missing.

    Args:
        folder: Folder of the store.
        manifest: What all its states depend on; it lists no shards yet.
        shards: Row numbers of the conversations of each shard.
        written: Complete shards of an earlier run, by file name.
    """

    folder: Path
    manifest: Manifest
    shards: list[list[int]]
    written: dict[str, Shard]

    @property
    def missing(self) -> dict[int, list[int]]:
        """Rows of each shard that is still to be written, by the shard's number."""
        return {number: rows for number, rows in enumerate(self.shards) if shard_name(number) not in self.written}

    @property
    def missing_rows(self) -> list[int]:
        """Rows that are still to be written."""
        return [row for rows in self.missing.values() for row in rows]

    def num_bytes(self, rows: Sequence[int], texts: Texts) -> int:
        """Return the size of some conversations in the store."""
        manifest = self.manifest
        per_token = bytes_per_token(len(manifest.layers), manifest.hidden_size, manifest.dtype)
        return texts.num_tokens(rows) * per_token + len(rows) * BYTES_PER_ROW


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def parse_layers(layers: str, with_last: bool, num_layers: int) -> tuple[int, ...]:
    """Return the layers to store, from text like ``-1,2,5``.

    Args:
        layers: The text.
        with_last: Whether the last layer is stored even if the text does not name it.
        num_layers: Number of layers of the base.

    Raises:
        ValueError: The text is not a list of numbers, or the base has no such layer.
    """
    try:
        numbers = [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f"layers is {layers!r}: give numbers with commas between them, as -1,2,5") from None
    if with_last and LAST_HIDDEN not in numbers:
        numbers.append(LAST_HIDDEN)
    wrong = [layer for layer in numbers if not LAST_HIDDEN <= layer <= num_layers or numbers.count(layer) > 1]
    if wrong:
        raise ValueError(f"layer {wrong[0]} is not there or given twice: the base has -1, 0, ..., {num_layers}")
    return tuple(numbers)


def divide_into_shards(names: Sequence[bytes], row_bytes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """Return the rows of each shard, longest rows first. Every run with the same rows divides them in the same way.

    Args:
        names: Key of each row; of rows with equal keys, only the first is stored.
        row_bytes: Size of each row.
        shard_bytes: Maximum size of a shard, unless a single row is larger.
    """
    first = {name: row for row, name in reversed(list(enumerate(names)))}
    shards: list[list[int]] = []
    size = shard_bytes
    for row in sorted(first.values(), key=lambda row: (-row_bytes[row], row)):
        if not shards or size + row_bytes[row] > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += row_bytes[row]
    return shards


def find_written_shards(folder: Path, manifest: Manifest, verify: bool) -> dict[str, Shard]:
    """Return the complete shards of an earlier run, by file name.

    Args:
        folder: Folder of the store.
        manifest: Manifest of the store to be written.
        verify: Compare the shards' checksums instead of their sizes only.

    Raises:
        ValueError: The folder holds another store, or other files.
    """
    if not (folder / MANIFEST).exists():
        if folder.is_dir() and any(not path.name.endswith(".new") for path in folder.iterdir()):
            raise ValueError(f"{folder} holds other files: give another --out")
        return {}
    earlier = Manifest.read(folder)
    if changed := differing_settings(manifest, earlier):
        name, theirs, ours = changed[0], getattr(earlier, changed[0]), getattr(manifest, changed[0])
        name = {"rows": "set of conversations", "base_hash": "base"}.get(name, name)
        raise ValueError(f"{folder} holds a store of another {name} ({theirs}, not {ours}): give another --out")
    return {shard.file: shard for shard in earlier.shards if is_complete(folder / shard.file, shard, verify)}


def is_complete(path: Path, shard: Shard, verify: bool) -> bool:
    """Whether a shard's file has the size, and if ``verify`` is true the checksum, that it was written with."""
    if not path.is_file() or path.stat().st_size != shard.num_bytes:
        return False
    return not verify or checksum(path) == shard.sha256


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise ValueError if the disk has less free space than ``num_bytes``."""
    free = shutil.disk_usage(folder_above(folder / MANIFEST)).free
    if num_bytes > free:
        raise ValueError(
            f"the store needs {decimal(num_bytes)} and {folder} has {decimal(free)} left: "
            "make room, or pass --dtype int8, fewer --layers or --limit"
        )
