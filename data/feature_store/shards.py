"""A shard of the feature store: conversations, and what a base says about them, in one safetensors file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from datasets import Dataset

KEY_BYTES = 16
BYTES_PER_ROW = KEY_BYTES + 8  # its key, and where it starts
StoreDtype = Literal["float32", "float16", "bfloat16", "int8"]


@dataclass(frozen=True)
class Shard:
    """One file of the store: its name, what it holds and how to see that it is whole."""

    file: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    sha256: str


def bytes_per_token(num_layers: int, hidden_size: int, dtype: StoreDtype) -> int:
    """Bytes on disk: the states, in int8 a scale for each layer's, and labels, tokens and mask."""
    state = hidden_size * {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[dtype] + 4 * (dtype == "int8")
    return num_layers * state + 4 + 4 + 1


def pack(states: Tensor, dtype: StoreDtype) -> tuple[Tensor, Tensor | None]:
    """States (S, D) in the store's number format, and for int8 the scale of each token (S,) float32.

    Raises:
        ValueError: They are not finite, or too large for float16.
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
    """The inverse of `pack`, for any leading shape: layers side by side (..., F * D), their scales (..., F)."""
    if scale is None:
        return packed.to(dtype)
    return (packed.unflatten(-1, (scale.shape[-1], -1)).float() * scale[..., None]).flatten(-2).to(dtype)


def keys(rows: Dataset) -> list[bytes]:
    """What each row is known by: a hash of its tokens and its mask, whatever file it came from."""
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
    """Write one shard, whole or not at all.

    Args:
        path: Its file.
        names: Keys of its rows.
        tensors: Of each row ``id``, ``input_ids``, ``loss_mask`` and ``labels`` (S,) and ``hidden`` (S, F * D).
        layers: The F layers side by side in ``hidden``.
        dtype: Number format of the states.

    Raises:
        ValueError: States do not fit the number format, or the disk takes no more.
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
    new = path.with_name(f"{path.name}.new")
    try:
        new.touch()
        mode = new.stat().st_mode
        save_file(data, new)
        new.chmod(mode)  # safetensors makes files that only their owner reads
        shard = Shard(path.name, len(lengths), sum(lengths), new.stat().st_size, checksum(new))
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be written ({error}): make room and run again, what is written stays"
        ) from error
    finally:
        new.unlink(missing_ok=True)
    return shard


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
