"""The feature store: hidden states and labels of a frozen base, in safetensors shards with a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from data.dtypes import StoreDtype
from data.files import DiskError, atomic_write, checksum, hash_of, read_json, reading, validated, write_text

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 2
MANIFEST = "manifest.json"
AGAIN = "write the store again with `drafters features`"
LAST_HIDDEN = -1  # the layer number of the normed last hidden state, which the LM head reads
KEY_BYTES = 16
BYTES_PER_ROW = KEY_BYTES + 8  # the key of the row and its start
# What is the same in stores that are read as one.
ALIKE = "base_hash", "base_dtype", "tokenizer", "template", "template_date", "max_length", "dtype"


@dataclass(frozen=True)
class Shard:
    """Name, content and checksum of one shard file."""

    file: str
    num_rows: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: everything the hidden states depend on, and the shards that are written."""

    base: str  # folder or hub id
    base_dtype: str
    base_hash: str  # of the base's shape and of samples of its weights
    tokenizer: str  # `tokenizer_hash`
    template: str  # `short_hash` of its text
    template_name: str
    max_length: int
    layers: tuple[int, ...]  # 0 is the embedding, -1 the normed last hidden state
    hidden_size: int
    dtype: StoreDtype  # of the stored hidden states
    rows: str  # hash of the keys of all rows, in the order of the shards
    num_rows: int
    num_tokens: int
    shard_bytes: int  # planned size of a shard
    files: tuple[dict[str, Any], ...] = ()  # name, size and time, for information only: rows are found by key
    shards: tuple[Shard, ...] = ()  # those written so far, in order
    is_complete: bool = False
    computed_in: str = ""  # the dtype in which the base ran, if not base_dtype

    @property
    def template_date(self) -> str:
        """The date that the template wrote into every text; empty if it writes none."""
        return self.template_name.partition(":date=")[2]

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically."""
        write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read manifest.json; raises ValueError if it is missing or damaged."""
        path = folder / MANIFEST
        with reading(path, AGAIN):
            values = read_json(path, AGAIN)
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, not {FORMAT}")
            manifest = validated(cls, values)
            if any(Path(shard.file).name != shard.file for shard in manifest.shards):
                raise ValueError("a shard outside its folder")
        return manifest

    def differing_setting(self, other: Manifest) -> str | None:
        """Return the name of a setting in which two stores differ; names, files and shards are not settings."""
        ignored = {"base", "files", "shards", "is_complete", "template_name"}
        names = [field.name for field in fields(Manifest) if field.name not in ignored]
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


def stored_template(folder: str | Path) -> str:
    """Return the name of the template by which the store in a folder was rendered; empty if there is no store."""
    folder = Path(folder).expanduser()
    return Manifest.read(folder).template_name if (folder / MANIFEST).is_file() else ""


def bytes_per_token(num_layers: int, hidden_size: int, dtype: StoreDtype) -> int:
    """Return the bytes per token on disk: hidden states (in int8 with a scale per layer), label, id and mask."""
    state = hidden_size * getattr(torch, dtype).itemsize + 4 * (dtype == "int8")
    return num_layers * state + 4 + 4 + 1


def pack(states: Tensor, dtype: StoreDtype) -> tuple[Tensor, Tensor | None]:
    """Convert hidden states (S, D) to the dtype of the store, for int8 with the scale of each token (S,) in float32.

    Raises ValueError if the states are not finite, or too large for float16.
    """
    if not torch.isfinite(states).all():
        raise ValueError("the base's hidden states are not finite")
    if dtype != "int8":
        packed = states.to(getattr(torch, dtype))
        if not torch.isfinite(packed).all():
            largest = states.abs().max().item()
            raise ValueError(f"hidden states reach {largest:.3g}, beyond {dtype}: pass --dtype bfloat16 or float32")
        return packed, None
    scale = states.float().abs().amax(-1) / 127
    steps = states.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return steps.round().clamp(-127, 127).to(torch.int8), scale


def unpack(packed: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Invert `pack` for any leading shape: layers side by side (..., F * D) with their scales (..., F)."""
    if scale is None:
        return packed.to(dtype)
    return (packed.unflatten(-1, (scale.shape[-1], -1)).float() * scale[..., None]).flatten(-2).to(dtype)


def row_keys(rows: Dataset) -> list[bytes]:
    """Return the key of each row: a hash of its tokens and its loss mask, independent of the file it came from."""
    table, keys = rows.with_format("arrow")[:], []
    for ids, mask in zip(table["input_ids"], table["loss_mask"], strict=True):
        ids_bytes = ids.values.to_numpy().astype(np.int32).tobytes()
        mask_bytes = mask.values.to_numpy().astype(np.int8).tobytes()
        keys.append(bytes.fromhex(hash_of([ids_bytes, b"/", mask_bytes], 2 * KEY_BYTES)))
    return keys


def pack_shard(
    keys: Sequence[bytes], rows: Iterable[dict[str, Any]], layers: Sequence[int], dtype: StoreDtype
) -> dict[str, Tensor]:
    """Return the tensors of one shard, or raise ValueError if the states do not fit the dtype.

    Each row has a key, ``id``, ``input_ids``, ``loss_mask`` and ``labels`` (S,), and ``hidden`` (S, F * D), which holds
    the F layers side by side.
    """
    columns: dict[str, list[Tensor]] = {}
    lengths = []
    for row in rows:
        lengths.append(len(row["input_ids"]))
        values = {name: row[name].to(torch.int32) for name in ("input_ids", "labels")}
        values["loss_mask"] = row["loss_mask"].to(torch.uint8)
        for layer, states in zip(layers, row["hidden"].chunk(len(layers), dim=-1), strict=True):
            try:
                values[f"layer.{layer}"], scale = pack(states, dtype)
            except ValueError as error:
                raise ValueError(f"conversation {row['id']}, layer {layer}: {error}") from error
            if scale is not None:
                values[f"scale.{layer}"] = scale
        for name, value in values.items():
            columns.setdefault(name, []).append(value.cpu())
    data = {name: torch.cat(columns.pop(name)).contiguous() for name in list(columns)}
    data["starts"] = torch.tensor([0, *lengths]).cumsum(0)
    data["keys"] = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
    return data


def save_shard(path: Path, data: dict[str, Tensor]) -> Shard:
    """Write the tensors of one shard atomically, or raise ValueError if the disk has no room."""
    try:
        with atomic_write(path) as new:
            save_file(data, new)
            return Shard(path.name, len(data["keys"]), checksum(new))
    except (OSError, SafetensorError, DiskError) as error:
        raise ValueError(
            f"{path} cannot be written ({error}): free some space and run again, finished shards are kept"
        ) from error


class FeatureStore:
    """The finished feature store in a folder, or in several, read row by row through memory maps.

    Its manifest is that of the first folder, with the layers that all of them hold. Raises ValueError if a store is
    damaged, or was written in another way than the first.
    """

    def __init__(self, *folders: str | Path) -> None:
        manifests = {(path := Path(folder).expanduser()): Manifest.read(path) for folder in folders}
        self.folder, self.manifest = next(iter(manifests.items()))
        self._shards: list[tuple[Path, Shard]] = []
        for folder, manifest in manifests.items():
            if not manifest.is_complete:
                raise ValueError(
                    f"the feature store {folder} is not finished: run its `drafters features` command again"
                )
            for name in ALIKE:
                if (value := getattr(manifest, name)) != (first := getattr(self.manifest, name)):
                    raise ValueError(
                        f"the feature store {folder} has another {name} than {self.folder} ({value}, not {first}): "
                        "train on stores that were written in the same way"
                    )
            layers = tuple(layer for layer in self.manifest.layers if layer in manifest.layers)
            self.manifest = replace(self.manifest, layers=layers)
            self._shards += [(folder / shard.file, shard) for shard in manifest.shards]
        # Shared with the processes that load batches, so that each shard is compared once, and not all at the start.
        self._is_checked = torch.zeros(len(self._shards), dtype=torch.bool).share_memory_()
        self.layers = self.manifest.layers  # the layers to read as `hidden`; a trainer selects those its drafter reads

    def check(self, tokenizer: str, template: str, template_name: str, max_length: int) -> None:
        """Raise ValueError if conversations were not tokenised in the same way as those of the store."""
        stored = self.manifest
        if tokenizer != stored.tokenizer:
            self.refuse(f"by {stored.base}, which has another tokenizer", f"--model.base {stored.base}")
        if template != stored.template:
            problem = f"with the template {stored.template_name}, whose text is not that of {template_name}"
            self.refuse(problem, f"--data.template {stored.template_name}")
        if max_length != stored.max_length:
            self.refuse(
                f"with max_length {stored.max_length}, not {max_length}", f"--data.max_length {stored.max_length}"
            )

    def refuse(self, problem: str, argument: str) -> NoReturn:
        """Raise ValueError: the store was written in another way than the training, which could change its argument."""
        raise ValueError(
            f"the feature store {self.folder} was written {problem}: pass {argument}, or write another store"
        )

    def find(self, rows: Dataset) -> list[tuple[int, int, int]]:
        """Find rows in the store: the shard of each row, its first token there, and the token after its last."""
        places: dict[bytes, tuple[int, int, int]] = {}
        for number, (path, _) in enumerate(self._shards):
            with reading(path, AGAIN), self._open(number) as opened:
                starts, stored = opened.get_tensor("starts").tolist(), opened.get_tensor("keys").numpy()
            for key, (start, end) in zip(stored, pairwise(starts), strict=True):
                places[key.tobytes()] = (number, start, end)
        keys = row_keys(rows)
        if missing := [row for row, key in enumerate(keys) if key not in places]:
            raise ValueError(
                f"{len(missing)} of {len(keys)} conversations are not in the feature store {self.folder}, the "
                f"first is {rows[missing[0]]['id']}: it was written from other files, or with another limit"
            )
        return [places[key] for key in keys]

    def read(self, place: tuple[int, int, int]) -> dict[str, Tensor]:
        """Read the row at a place that `find` returns, with its hidden states in the dtype of the store.

        It has ``input_ids``, ``loss_mask`` and ``labels`` (S,), and ``hidden`` (S, F * D), the states of `layers`. If
        the normed last hidden state is stored but not in `layers`, it is ``last_hidden`` (S, D). An int8 store adds the
        scales ``hidden_scale`` (S, F) and ``last_hidden_scale`` (S, 1).
        """
        number, start, end = place
        self._check(number)
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
        path, _ = self._shards[number]
        with reading(path, AGAIN):
            return safe_open(path, framework="pt")

    def _check(self, number: int) -> None:
        """Compare the checksum of a shard before its first row is read."""
        path, shard = self._shards[number]
        with reading(path, AGAIN):
            if not self._is_checked[number] and checksum(path) != shard.sha256:
                raise ValueError("it is damaged, as it does not have its checksum in the manifest")
        self._is_checked[number] = True


@dataclass(frozen=True)
class StoredRows(TorchDataset[dict[str, Tensor]]):
    """A map-style data set of the rows of a feature store, in the order of ``places``."""

    store: FeatureStore
    places: Sequence[tuple[int, int, int]]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.store.read(self.places[row])
