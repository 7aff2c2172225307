"""Reads training checkpoints, a single file or DeepSpeed's folder, without running any code that they contain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from data.files import cause_of
from train.checkpointing.checkpoints import check_complete

ZIP_MAGIC = b"PK\x03\x04"
Shapes = dict[str, Sequence[int]]  # shape of each weight of a parameter group, in order

# Empty classes under the names of those in DeepSpeed's files, so that the files load without DeepSpeed and its code.
PLACEHOLDERS: list[Any] = [
    type(name.split(".")[-1], (), {"__module__": name.rpartition(".")[0], "__init__": lambda self, *_: None})
    for name in (
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a Lightning checkpoint. From DeepSpeed's folder, the optimizer states are left out.

    Raises:
        ValueError: There is no checkpoint at this path, or it is damaged.
    """
    if (path / "latest").is_file():
        try:
            return _read_shards(path / (path / "latest").read_text(encoding="utf-8").strip())
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path} is not a complete checkpoint of DeepSpeed ({error!r}): copy it again") from error
    checkpoints = [file for pattern in ("*.ckpt", "checkpoints/*.ckpt") for file in sorted(path.glob(pattern))]
    if checkpoints:
        names = ", ".join(str(file.relative_to(path)) for file in checkpoints)
        raise ValueError(f"{path} is a folder: give a checkpoint in it, one of {names}")
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}: give the .ckpt that `lightning fit` wrote")
    return _load(path)


def hyper_parameters(saved: Any) -> dict[str, Any]:
    """The arguments of the training; empty for a file of another kind."""
    arguments = saved.get("hyper_parameters") if isinstance(saved, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def _load(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    if is_zip:  # torch does not compare the checksums in it
        check_complete(path)
    try:
        with torch.serialization.safe_globals(PLACEHOLDERS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch's own message suggests to run the code in the file
        raise ValueError(
            f"{path} is not a readable checkpoint: it is another kind of file, or holds more than weights and numbers; "
            "give the .ckpt that `lightning fit` wrote"
        ) from error
    except Exception as error:  # zip and I/O errors have types of their own
        raise ValueError(f"{path} is not a readable checkpoint ({cause_of(error)}); train or copy it again") from error


def _read_shards(folder: Path) -> dict[str, Any]:
    """Read what DeepSpeed's stages 1 to 3 save: only the optimizer's shards hold the weights in float32."""
    models, shards = ([_load(path) for path in _by_rank(folder, kind)] for kind in ("model", "optim"))
    if not models or not shards:
        raise ValueError(f"{folder} lacks the files *_model_states.pt and *_optim_states.pt: copy the checkpoint again")
    saved, shards = models[0], [shard["optimizer_state_dict"] for shard in shards]
    count = shards[0]["partition_count"]  # at stages 1 and 2, a list with an entry for each parameter group
    num_shards = max(count) if isinstance(count, list) else count
    if len(shards) != num_shards:
        raise ValueError(
            f"{folder} holds {len(shards)} of {num_shards} files *_optim_states.pt: copy the rest there too"
        )
    groups = saved["param_shapes"]
    if "fp32_flat_groups" in shards[0]:
        weights = join_slices([torch.cat(shard["fp32_flat_groups"]) for shard in shards], groups)
    else:
        rows = [torch.cat(parts) for parts in zip(*(s["single_partition_of_fp32_groups"] for s in shards), strict=True)]
        weights = split_rows(rows, groups, shards[0].get("param_alignment_paddings"))
    buffers = {name: saved["module"][name] for name in saved["buffer_names"]}
    return saved | {"state_dict": buffers | weights}


def _by_rank(folder: Path, kind: str) -> list[Path]:
    def ranks(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.name)]

    return sorted(folder.glob(f"*_{kind}_states.pt"), key=ranks)


def split_rows(
    rows: Sequence[Tensor], groups: Sequence[Shapes], paddings: Sequence[Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """Split the flat row of each parameter group into its weights, which is the layout of stages 1 and 2.

    Args:
        rows: The weights of each group, one after the other.
        groups: Shapes of the weights of each group.
        paddings: Number of elements after each weight that are not part of it; 0 if not given.

    >>> split_rows([torch.tensor([1.0, 2.0, 0.0, 3.0])], [{"a": (2, 1), "b": (1,)}], [[1, 0]])
    {'a': tensor([[1.],
            [2.]]), 'b': tensor([3.])}
    """
    weights = {}
    for index, (row, shapes) in enumerate(zip(rows, groups, strict=True)):
        start = 0
        for position, (name, shape) in enumerate(shapes.items()):
            weights[name] = row[start : start + prod(shape)].view(shape)
            start += prod(shape) + (paddings[index][position] if paddings else 0)
    return weights


def join_slices(rows: Sequence[Tensor], groups: Sequence[Shapes]) -> dict[str, Tensor]:
    """Join weights that are cut into one slice for each process, which is the layout of stage 3.

    Args:
        rows: The slices of each process, one after the other; the last slice of a weight is padded.
        groups: Shapes of the weights of each parameter group.

    >>> join_slices([torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 0.0, 5.0])], [{"a": (3,)}, {"b": (2,)}])
    {'a': tensor([1., 2., 3.]), 'b': tensor([4., 5.])}
    """
    weights, start = {}, 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        size = -(-prod(shape) // len(rows))
        whole = torch.cat([row[start : start + size] for row in rows])
        weights[name] = whole[: prod(shape)].view(shape)
        start += size
    return weights
