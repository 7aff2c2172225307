"""Reads a feature store: the hidden states and labels of a frozen base, in safetensors shards with a manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from data.feature_store.shards import KEY_BYTES, Shard, StoreDtype, row_keys
from data.files import MALFORMED, read_json, validated, write_text

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1
MANIFEST = "manifest.json"
LAST_HIDDEN = -1  # the layer number of the normed last hidden state, which the LM head reads


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: everything the hidden states depend on, and the shards that are written.

    Args:
        base: Folder or hub id of the base.
        base_dtype: Dtype the base ran in.
        base_hash: Hash of the base's shape and of samples of its weights.
        tokenizer: `tokenizer_hash` of the base's tokenizer.
        template: `short_hash` of the text of the chat template.
        template_name: Name of the chat template.
        max_length: Largest number of tokens per conversation.
        layers: The stored layers; 0 is the embedding, -1 the normed last hidden state.
        hidden_size: Hidden size D of the base.
        dtype: Dtype of the stored hidden states.
        rows: Hash of the keys of all rows, in the order of the shards.
        num_rows: Number of conversations.
        num_tokens: Number of tokens of all conversations.
        shard_bytes: Planned size of a shard.
        files: Name, size and time of the files that were read, for information only: rows are found by key.
        shards: The shards written so far, in order.
        is_complete: Whether all shards are written.
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
        """Write manifest.json atomically."""
        write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read manifest.json.

        Raises:
            ValueError: The file is missing or damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"no feature store at {folder}: {MANIFEST} is missing; write one with `drafters features`")
        try:
            values = read_json(path)
            if (version := values.pop("format")) != FORMAT:
                raise ValueError(f"format {version}, not {FORMAT}")
            if (dtype := values.get("dtype")) not in get_args(StoreDtype):
                raise ValueError(f"an unknown dtype, {dtype!r}")
            manifest = validated(cls, values)
            if any(Path(shard.file).name != shard.file for shard in manifest.shards):
                raise ValueError("a shard outside its folder")
            if any(min(shard.num_rows, shard.num_tokens) < 0 for shard in manifest.shards):
                raise ValueError("a shard of a negative size")
        except MALFORMED as error:
            raise ValueError(f"{path} is not a manifest of a feature store ({error}); write the store again") from error
        return manifest


class FeatureStore:
    """A finished feature store, read row by row through memory maps.

    Args:
        folder: The folder that `drafters features` wrote.

    Raises:
        ValueError: The store is missing, unfinished or damaged. The message names the file.
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
        self.layers = self.manifest.layers  # the layers to read as `hidden`; a trainer selects those its drafter reads

    def check(self, tokenizer: str, template: str, template_name: str, max_length: int) -> None:
        """Check that conversations were tokenised in the same way as those of the store.

        Args:
            tokenizer: `tokenizer_hash` of the tokenizer.
            template: `short_hash` of the text of the chat template.
            template_name: Name of the chat template.
            max_length: Largest number of tokens per conversation.

        Raises:
            ValueError: The store was written with another setting. The message names it.
        """
        stored = self.manifest
        if tokenizer != stored.tokenizer:
            raise ValueError(
                f"the feature store {self.folder} was written by {stored.base}, and this base has another tokenizer: "
                f"pass --model.base {stored.base}, or write a store of this base with `drafters features`"
            )
        if template != stored.template:
            raise ValueError(
                f"the feature store {self.folder} was written with the template {stored.template_name}, whose text "
                f"is not that of {template_name}: pass --data.template {stored.template_name}, or write another store"
            )
        if max_length != stored.max_length:
            raise ValueError(
                f"the feature store {self.folder} was written with max_length {stored.max_length}, not {max_length}: "
                f"pass --data.max_length {stored.max_length}, or write another store"
            )

    def find(self, rows: Dataset) -> list[tuple[int, int, int]]:
        """Find rows in the store.

        Returns:
            For each row the number of its shard, its first token there, and the token after its last.

        Raises:
            ValueError: Some rows are not in the store.
        """
        places: dict[bytes, tuple[int, int, int]] = {}
        for number, shard in enumerate(self.manifest.shards):
            with self._open(number) as opened:
                if not self._fits(opened, shard):
                    raise ValueError(
                        f"{self.folder / shard.file} is not the file that the manifest describes: write the store again"
                    )
                starts, names = opened.get_tensor("starts").tolist(), opened.get_tensor("keys").numpy()
            for name, start, end in zip(names, starts[:-1], starts[1:], strict=True):
                places[name.tobytes()] = (number, start, end)
        keys = row_keys(rows)
        if missing := [row for row, key in enumerate(keys) if key not in places]:
            raise ValueError(
                f"{len(missing)} of {len(keys)} conversations are not in the feature store {self.folder}, the "
                f"first is {rows[missing[0]]['id']}: it was written from other files, or with another limit"
            )
        return [places[key] for key in keys]

    def _fits(self, opened: safe_open, shard: Shard) -> bool:
        """Whether a shard holds the tensors that the manifest says, in their shapes."""
        states = {f"layer.{layer}": (shard.num_tokens, self.manifest.hidden_size) for layer in self.manifest.layers}
        scales = {f"scale.{layer}": (shard.num_tokens,) for layer in self.manifest.layers}
        expected: dict[str, tuple[int, ...]] = {**states, **(scales if self.manifest.dtype == "int8" else {})}
        expected |= dict.fromkeys(("input_ids", "loss_mask", "labels"), (shard.num_tokens,))
        expected |= {"starts": (shard.num_rows + 1,), "keys": (shard.num_rows, KEY_BYTES)}
        held = set(opened.keys())
        if not all(name in held and tuple(opened.get_slice(name).get_shape()) == expected[name] for name in expected):
            return False
        starts, keys = opened.get_tensor("starts"), opened.get_tensor("keys")
        in_order = bool((starts.diff() >= 0).all()) and starts[0] == 0 and starts[-1] == shard.num_tokens
        return in_order and starts.dtype == torch.int64 and keys.dtype == torch.uint8

    def read(self, place: tuple[int, int, int]) -> dict[str, Tensor]:
        """Read one row, with its hidden states in the dtype of the store.

        Args:
            place: Where the row is, as `find` returns it.

        Returns:
            ``input_ids``, ``loss_mask`` and ``labels`` (S,), and ``hidden`` (S, F * D), the states of `layers`. If the
            normed last hidden state is stored but not in `layers`, it is ``last_hidden`` (S, D). An int8 store adds the
            scales ``hidden_scale`` (S, F) and ``last_hidden_scale`` (S, 1).
        """
        number, start, end = place
        with self._open(number) as opened:

            def part(name: str) -> Tensor:
                return opened.get_slice(name)[start:end]

            row = {name: part(name) for name in ("input_ids", "loss_mask", "labels")}
            last = (LAST_HIDDEN,) if LAST_HIDDEN in self.manifest.layers and LAST_HIDDEN not in self.layers else ()
            for name, layers in (("hidden", self.layers), ("last_hidden", last)):
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
class StoredRows(TorchDataset[dict[str, Tensor]]):
    """A map-style data set of the rows of a feature store, in the order of ``places``."""

    store: FeatureStore
    places: Sequence[tuple[int, int, int]]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.store.read(self.places[row])


def differing_settings(left: Manifest, right: Manifest) -> list[str]:
    """Return the names of the settings in which two stores differ; names, files and shards are not settings."""
    ignored = {"base", "files", "shards", "is_complete", "template_name"}
    names = [entry.name for entry in fields(Manifest) if entry.name not in ignored]
    return [name for name in names if getattr(left, name) != getattr(right, name)]
