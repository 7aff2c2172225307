"""What a training saved, read without running any code in it: one file, or the folder that DeepSpeed writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

Shapes = dict[str, Sequence[int]]  # of a parameter group's weights, in their order

STAND_INS = [  # for classes in DeepSpeed's files, none of which is needed: their numbers are read, their code is not
    type(name.split(".")[-1], (), {"__module__": name.rpartition(".")[0], "__init__": lambda self, *given: None})
    for name in (
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A Lightning checkpoint; of DeepSpeed's folder without the states of optimizers.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    if (path / "latest").is_file():
        return _read_shards(path / (path / "latest").read_text(encoding="utf-8").strip())
    inside = [file for pattern in ("*.ckpt", "checkpoints/*.ckpt") for file in sorted(path.glob(pattern))]
    if inside:
        names = ", ".join(str(file.relative_to(path)) for file in inside)
        raise ValueError(f"{path} is a folder: give a checkpoint in it, one of {names}")
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}: give the .ckpt that `lightning fit` wrote")
    return _load(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch's own words advise to run what the file holds
        raise ValueError(
            f"{path} is not a readable checkpoint: it is another kind of file, or holds more than weights and numbers; "
            "give the .ckpt that `lightning fit` wrote"
        ) from error
    except Exception as error:  # zip and I/O errors each have their own type
        raise ValueError(
            f"{path} is not a readable checkpoint ({str(error).splitlines()[0]}); train or copy it again"
        ) from error


def _read_shards(folder: Path) -> dict[str, Any]:
    """What DeepSpeed's stages 1 to 3 save: weights in float32 are kept in the optimizer's shards alone."""
    models, shards = ([_load(path) for path in _by_rank(folder, kind)] for kind in ("model", "optim"))
    if not models or not shards:
        raise ValueError(f"{folder} lacks the files *_model_states.pt and *_optim_states.pt: copy the checkpoint again")
    saved, shards = models[0], [shard["optimizer_state_dict"] for shard in shards]
    expected = shards[0]["partition_count"]  # by parameter group at stages 1 and 2
    expected = max(expected) if isinstance(expected, list) else expected
    if len(shards) != expected:
        raise ValueError(f"{folder} holds {len(shards)} of {expected} files *_optim_states.pt: copy the rest there too")
    groups = saved["param_shapes"]
    if "fp32_flat_groups" in shards[0]:
        weights = from_slices([torch.cat(shard["fp32_flat_groups"]) for shard in shards], groups)
    else:
        runs = [torch.cat(parts) for parts in zip(*(s["single_partition_of_fp32_groups"] for s in shards), strict=True)]
        weights = from_runs(runs, groups, shards[0].get("param_alignment_paddings"))
    kept = {name: saved["module"][name] for name in saved["buffer_names"]}
    return saved | {"state_dict": kept | weights}


def _by_rank(folder: Path, kind: str) -> list[Path]:
    numbers = lambda path: [int(number) for number in re.findall(r"\d+", path.name)]  # noqa: E731
    return sorted(folder.glob(f"*_{kind}_states.pt"), key=numbers)


def from_runs(
    runs: Sequence[Tensor], groups: Sequence[Shapes], paddings: Sequence[Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """Weights that lie one behind the other, as stages 1 and 2 hold them before the processes share the row.

    >>> from_runs([torch.tensor([1.0, 2.0, 0.0, 3.0])], [{"a": (2, 1), "b": (1,)}], [[1, 0]])
    {'a': tensor([[1.],
            [2.]]), 'b': tensor([3.])}
    """
    weights = {}
    for index, (run, shapes) in enumerate(zip(runs, groups, strict=True)):
        start = 0
        for place, (name, shape) in enumerate(shapes.items()):
            weights[name] = run[start : start + prod(shape)].view(shape)
            start += prod(shape) + (paddings[index][place] if paddings else 0)
    return weights


def from_slices(rows: Sequence[Tensor], groups: Sequence[Shapes]) -> dict[str, Tensor]:
    """Weights each of which is cut into equal slices, one a process, the last filled up: stage 3.

    >>> from_slices([torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 0.0, 5.0])], [{"a": (3,)}, {"b": (2,)}])
    {'a': tensor([1., 2., 3.]), 'b': tensor([4., 5.])}
    """
    weights, start = {}, 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        size = -(-prod(shape) // len(rows))
        whole = torch.cat([row[start : start + size] for row in rows])
        weights[name] = whole[: prod(shape)].view(shape)
        start += size
    return weights
