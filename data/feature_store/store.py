"""The feature store: what a frozen base says about conversations, in safetensors shards beside a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.feature_store.shards import Shard, StoreDtype, keys

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1
MANIFEST = "manifest.json"
LAST = -1  # the normed last state, which the head reads


@dataclass(frozen=True)
class Manifest:
    """What manifest.json holds: all that the states depend on, and the shards that are written.

    Args:
        base: Folder or hub id of the base.
        base_dtype: Number format it ran in.
        base_hash: Of its numbers and of samples of its weights.
        tokenizer: `tokenizer_hash` of its tokenizer.
        template: `short_hash` of the text of the chat template.
        template_name: The template as it was asked for.
        max_length: Longest conversation in tokens.
        layers: Stored layers; 0 is the embedding, -1 the normed last state.
        hidden_size: D.
        dtype: Number format of the states.
        rows: Hash of the keys of all rows, in the order of the shards.
        num_rows: Conversations.
        num_tokens: Tokens of all rows.
        shard_bytes: Size a shard is planned for.
        files: Name, size and time of the files that were read, for the reader; a row is known by its own key.
        shards: Those written so far, by number.
        is_complete: Whether all are.
    """

    base: str
    base_dtype: str
    base_hash: str
    tokenizer: str
    template: str
    template_name: str
    max_length: int
    layers: tuple[int, ...]
    hidden_size: int
    dtype: StoreDtype
    rows: str
    num_rows: int
    num_tokens: int
    shard_bytes: int
    files: tuple[dict[str, Any], ...] = ()
    shards: tuple[Shard, ...] = ()
    is_complete: bool = False

    def save(self, folder: Path) -> None:
        """Write manifest.json, whole or not at all."""
        new = folder / f"{MANIFEST}.new"
        new.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(new, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read manifest.json; ValueError says what is wrong with it."""
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"no feature store at {folder}: {MANIFEST} is missing; write one with `drafters features`")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if (version := values.pop("format")) != FORMAT:
                raise ValueError(f"format {version}, not {FORMAT}")
            shards = tuple(Shard(**shard) for shard in values["shards"])
            found = cls(
                **values | {"layers": tuple(values["layers"]), "files": tuple(values["files"]), "shards": shards}
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of a feature store ({error}); write the store anew") from error
        if found.dtype not in get_args(StoreDtype):
            raise ValueError(f"{path} names the number format {found.dtype!r}; write the store anew")
        return found


class FeatureStore:
    """A finished store, read row by row through memory maps.

    Args:
        folder: Where `drafters features` wrote it.

    Raises:
        ValueError: It is missing, unfinished or damaged; the message says which file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.manifest = Manifest.read(self.folder)
        if not self.manifest.is_complete:
            raise ValueError(f"the feature store {folder} is not finished: run its `drafters features` command again")
        for shard in self.manifest.shards:
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                problem = "is not of the size in the manifest" if path.is_file() else "is missing"
                raise ValueError(f"{path} {problem}: run the store's `drafters features` command again")
        self.layers = self.manifest.layers  # to be read as `hidden`; a trainer chooses those its drafter needs

    def check(self, tokenizer: str, template: str, template_name: str, max_length: int) -> None:
        """Raise ValueError where conversations were tokenised in another way than the store's."""
        ours = self.manifest
        if tokenizer != ours.tokenizer:
            raise ValueError(
                f"the feature store {self.folder} was written by {ours.base}, and this base has another tokenizer: "
                f"pass --model.base {ours.base}, or write a store of this base with `drafters features`"
            )
        if template != ours.template:
            raise ValueError(
                f"the feature store {self.folder} was written with the template {ours.template_name}, whose text "
                f"is not that of {template_name}: pass --data.template {ours.template_name}, or write another store"
            )
        if max_length != ours.max_length:
            raise ValueError(
                f"the feature store {self.folder} was written with max_length {ours.max_length}, not {max_length}: "
                f"pass --data.max_length {ours.max_length}, or write another store"
            )

    def find(self, rows: Dataset) -> list[tuple[int, int, int]]:
        """Where each row stands: the number of its shard, and its first and last + 1 token there.

        Raises:
            ValueError: Some are not in the store.
        """
        places: dict[bytes, tuple[int, int, int]] = {}
        for number, shard in enumerate(self.manifest.shards):
            with self._open(number) as opened:
                starts, names = opened.get_tensor("starts").tolist(), opened.get_tensor("keys").numpy()
            if len(names) != shard.num_rows:
                raise ValueError(
                    f"{self.folder / shard.file} is another file than the manifest's: write the store anew"
                )
            for name, start, end in zip(names, starts[:-1], starts[1:], strict=True):
                places[name.tobytes()] = (number, start, end)
        found = [places.get(key) for key in keys(rows)]
        if missing := found.count(None):
            raise ValueError(
                f"{missing} of {len(found)} conversations are not in the feature store {self.folder}, the first is "
                f"{rows[found.index(None)]['id']}: it was written from other files, or with another limit"
            )
        return found

    def read(self, place: tuple[int, int, int]) -> dict[str, Tensor]:
        """A row: ``input_ids``, ``loss_mask``, ``labels`` (S,), and the states in the store's number format.

        They are ``hidden`` (S, F * D) of `layers` and, where it is stored and not among them, ``last`` (S, D); in int8
        ``hidden_scale`` (S, F) and ``last_scale`` (S, 1) too.
        """
        number, start, end = place
        with self._open(number) as opened:

            def part(name: str) -> Tensor:
                return opened.get_slice(name)[start:end]

            row = {name: part(name) for name in ("input_ids", "loss_mask", "labels")}
            last = (LAST,) if LAST in self.manifest.layers and LAST not in self.layers else ()
            for name, layers in (("hidden", self.layers), ("last", last)):
                if layers:
                    row[name] = torch.cat([part(f"layer.{layer}") for layer in layers], dim=-1)
                    if self.manifest.dtype == "int8":
                        row[f"{name}_scale"] = torch.stack([part(f"scale.{layer}") for layer in layers], dim=-1)
        return row

    def _open(self, number: int) -> safe_open:
        path = self.folder / self.manifest.shards[number].file
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it and write the store again") from error


@dataclass(frozen=True)
class StoredRows:
    """A data set whose rows come with the base's states: for a DataLoader, in the order of ``places``."""

    store: FeatureStore
    places: Sequence[tuple[int, int, int]]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.store.read(self.places[row])


def differing(ours: Manifest, theirs: Manifest) -> list[str]:
    """Names of what two stores were asked for differently; files, shards and the base's folder do not count."""
    blank = {"base": "", "files": (), "shards": (), "is_complete": False, "template_name": ""}
    ours, theirs = (asdict(replace(manifest, **blank)) for manifest in (ours, theirs))
    return [name for name in ours if ours[name] != theirs[name]]
