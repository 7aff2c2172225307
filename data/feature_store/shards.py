"""Writes shards of a feature store: safetensors files of conversations with the base's hidden states and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.files import DiskError, atomic_write, checksum

if TYPE_CHECKING:
    from datasets import Dataset

KEY_BYTES = 16
BYTES_PER_ROW = KEY_BYTES + 8  # the key of the row and its start
StoreDtype = Literal["float32", "float16", "bfloat16", "int8"]


@dataclass(frozen=True)
class Shard:
    """Name, content and checksum of one shard file."""

    file: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    sha256: str


def bytes_per_token(num_layers: int, hidden_size: int, dtype: StoreDtype) -> int:
    """Return the bytes per token on disk: hidden states (in int8 with a scale per layer), label, id and mask."""
    state = hidden_size * {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[dtype] + 4 * (dtype == "int8")
    return num_layers * state + 4 + 4 + 1


def pack(states: Tensor, dtype: StoreDtype) -> tuple[Tensor, Tensor | None]:
    """Convert hidden states (S, D) to the dtype of the store.

    Returns:
        The converted states (S, D) and, for int8, the scale of each token (S,) in float32.

    Raises:
        ValueError: The states are not finite, or too large for float16.
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
    import numpy as np

    def parts(column: Any, dtype: type) -> Iterator[bytes]:
        starts, values = column.offsets.to_numpy(), column.values.to_numpy()
        for start, end in pairwise(starts):
            yield values[start:end].astype(dtype).tobytes()

    found = []
    for batch in rows.with_format("arrow")[:].to_batches():
        ids, masks = parts(batch["input_ids"], np.int32), parts(batch["loss_mask"], np.int8)
        found += [
            hashlib.blake2b(i + b"/" + m, digest_size=KEY_BYTES).digest() for i, m in zip(ids, masks, strict=True)
        ]
    return found


def write_shard(
    path: Path, names: Sequence[bytes], tensors: Iterable[dict[str, Any]], layers: Sequence[int], dtype: StoreDtype
) -> Shard:
    """Write one shard atomically.

    Args:
        path: File to write.
        names: Keys of the rows.
        tensors: For each row ``id``, ``input_ids``, ``loss_mask`` and ``labels`` (S,) and ``hidden`` (S, F * D).
        layers: The F layers that ``hidden`` holds side by side.
        dtype: Dtype to store the hidden states in.

    Raises:
        ValueError: Hidden states do not fit the dtype, or the file cannot be written.
    """
    columns: dict[str, list[Tensor]] = {}
    lengths = []
    for row in tensors:
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
    data["keys"] = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8).view(-1, KEY_BYTES)
    try:
        path.with_name(f"{path.name}.new").unlink(missing_ok=True)  # what an earlier version left if it was killed
        with atomic_write(path) as new:
            save_file(data, new)
            return Shard(path.name, len(lengths), sum(lengths), new.stat().st_size, checksum(new))
    except (OSError, SafetensorError, DiskError) as error:
        raise ValueError(
            f"{path} cannot be written ({error}): free some space and run again, finished shards are kept"
        ) from error
