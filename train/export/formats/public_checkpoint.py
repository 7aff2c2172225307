"""A drafter's folder in the format of another tool: config.json and weights in safetensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.files import check_files, read_json, validated
from drafters.protocol import BaseShape

COPIES = "verifier_lm_head.weight", "verifier_norm.weight"
"""Weights of the base that speculators needs in training only."""


@dataclass(frozen=True)
class PublicDrafter:
    """A drafter that was read from a public format.

    Args:
        class_path: Its class here.
        init_args: Its recipe.
        shape: Sizes of its layers, and of the base.
        weights: Its weights by the names they have here.
        left_out: Parts of the checkpoint that do not change what is drafted.
    """

    class_path: str
    init_args: dict[str, Any]
    shape: BaseShape
    weights: dict[str, Tensor]
    left_out: tuple[str, ...] = ()


@dataclass
class PublicCheckpoint:
    """The content of such a folder. Weights are taken out as they are read, so that none is overlooked.

    Args:
        folder: The folder.
        config: The content of config.json.
        weights: Weights by name that have not been taken yet.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor] = field(repr=False)

    def refuse(self, difference: str) -> NoReturn:
        """Raise ValueError: no drafter here computes the same."""
        raise ValueError(f"{self.folder} cannot be imported: {difference}")

    def settings(self, kind: Any, values: Any = None) -> Any:
        """A dataclass of settings from config.json, or from a part of it.

        Raises:
            ValueError: A setting is missing or of a wrong type.
        """
        try:
            return validated(kind, self.config if values is None else values)
        except ValueError as error:
            raise ValueError(f"{self.folder / 'config.json'}: {error}") from error

    def take(self, name: str) -> Tensor:
        """Take one weight out.

        Raises:
            ValueError: There is none of this name.
        """
        if name not in self.weights:
            self.refuse(f"it has no weights {name}")
        return self.weights.pop(name)

    def take_all(self, prefix: str) -> dict[str, Tensor]:
        """Take out all weights whose names begin with a prefix; their new names are without it."""
        names = [name for name in self.weights if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.weights.pop(name) for name in names}

    def drop_copy(self, name: str, original: Tensor, what: str) -> None:
        """Take out a copy of a weight of the base, if there is one.

        Raises:
            ValueError: It is not a copy; no drafter here has such a weight of its own.
        """
        if name not in self.weights:
            return
        copy = self.weights.pop(name)
        if copy.shape != original.shape or not torch.equal(copy, original.detach().cpu().to(copy.dtype)):
            self.refuse(f"its {name} differs from the base's, and no such drafter here has {what} of its own")

    def check_all_taken(self) -> None:
        """Raise ValueError if a weight was not read."""
        for name in COPIES:
            self.weights.pop(name, None)
        if self.weights:
            self.refuse(f"no drafter here has weights such as {min(self.weights)}")


def read_public_checkpoint(folder: Path) -> PublicCheckpoint:
    """Read config.json and all files of weights.

    Raises:
        ValueError: A file is missing or damaged, or the folder is a drafter of this project already.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: download the drafter first, then pass its folder")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not an object: download the drafter again")
    if "class_path" in config:
        raise ValueError(f"{folder} is a drafter of this project already: pass it as it is")
    check_files(folder)
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            shard = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}): download the drafter again") from error
        if twice := weights.keys() & shard.keys():
            raise ValueError(f"{path} repeats the weights {min(twice)} of another file: keep one of them")
        weights |= shard
    if not weights:
        raise ValueError(
            f"{folder} holds no *.safetensors: pickled weights (.bin, .pt) can run code and are not read; convert them"
        )
    return PublicCheckpoint(folder, config, weights)
