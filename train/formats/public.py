"""A drafter's folder in the format of another tool, and the fields that all checkpoints of speculators share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor

from data.files import check_files, read_json, reading, validated
from drafters.protocol import BaseShape
from drafters.public_formats import SpeculatorsConfig
from inference.bases import load_config
from inference.verifier.base import load_base_info

COPIES = "verifier_lm_head.weight", "verifier_norm.weight"
"""Weights of the base that speculators needs in training only."""


@dataclass(frozen=True)
class PublicDrafter:
    """A drafter that was read from a public format."""

    class_path: str  # its class here
    init_args: dict[str, Any]
    shape: BaseShape  # sizes of its layers, and of the base
    weights: dict[str, Tensor]  # by the names they have here
    left_out: tuple[str, ...] = ()  # parts of the checkpoint that do not change what is drafted


@dataclass
class PublicCheckpoint:
    """The content of such a folder. Weights are taken out as they are read, so that none is overlooked."""

    folder: Path  # or a GGUF file
    config: dict[str, Any]  # the content of config.json
    weights: dict[str, Tensor] = field(repr=False)  # those that have not been taken yet

    @property
    def speculators(self) -> SpeculatorsConfig:
        """The ``speculators_config``; of another format, one that names nothing."""
        return self.settings(SpeculatorsConfig, self.config.get("speculators_config") or {})

    @property
    def described_in(self) -> Path:
        """The file that holds its settings."""
        return self.folder / "config.json" if self.folder.is_dir() else self.folder

    def refuse(self, difference: str) -> NoReturn:
        """Raise ValueError: no drafter here computes the same."""
        raise ValueError(f"{self.folder} cannot be imported: {difference}")

    def settings(self, kind: Any, values: Any = None) -> Any:
        """A dataclass of settings from config.json, or from a part of it.

        Raises ValueError if a setting is missing or of a wrong type.
        """
        with reading(self.described_in):
            return validated(kind, self.config if values is None else values)

    def take(self, name: str) -> Tensor:
        """Take one weight out; ValueError if there is none of this name."""
        if name not in self.weights:
            self.refuse(f"it has no weights {name}")
        return self.weights.pop(name)

    def take_all(self, prefix: str) -> dict[str, Tensor]:
        """Take out all weights whose names begin with a prefix; their new names are without it."""
        names = [name for name in self.weights if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.weights.pop(name) for name in names}

    def drop_copy(self, name: str, original: Tensor, what: str) -> None:
        """Take out a copy of a weight of the base, if there is one.

        Raises ValueError if it is not a copy; no drafter here has such a weight of its own.
        """
        copy = self.weights.pop(name, None)
        if copy is None:
            return
        if copy.shape != original.shape or not torch.equal(copy, original.detach().cpu().to(copy.dtype)):
            self.refuse(f"its {name} differs from the base's, and no such drafter here has {what} of its own")

    def check_all_taken(self) -> None:
        """Raise ValueError if a weight was not read."""
        for name in COPIES:
            self.weights.pop(name, None)
        if self.weights:
            self.refuse(f"no drafter here has weights such as {min(self.weights)}")

    def check_hidden_layers(self, layers: Sequence[int], base: BaseShape) -> list[int]:
        """Return base layers that are fused, counted as here.

        Raises ValueError if the base does not have them, or they include its last one.
        """
        if base.num_layers in layers:
            self.refuse(
                f"it reads the base's last layer ({base.num_layers}), which trainers take before or after the final "
                "norm"
            )
        if not layers or not all(0 <= layer < base.num_layers for layer in layers):
            self.refuse(f"it reads the layers {list(layers)} of a base that has {base.num_layers}")
        return list(layers)

    def check_hidden_size(self, size: int | None, base: BaseShape) -> None:
        """Raise ValueError if a ``target_hidden_size`` is not the base's."""
        if size not in (None, base.hidden_size):
            self.refuse(f"its target_hidden_size is {size}, but the base's {base.hidden_size}")


def read_public_checkpoint(folder: Path) -> PublicCheckpoint:
    """Read config.json and all files of weights.

    Raises ValueError if a file is missing or damaged, or the folder is a drafter of this project already.
    """
    config = read_json(folder / "config.json", "download the drafter first, then pass its folder")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not an object: download the drafter again")
    if "class_path" in config:
        raise ValueError(f"{folder} is a drafter of this project already: pass it as it is")
    check_files(folder)
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with reading(path, "download the drafter again"):
            shard = load_file(path)
        if twice := weights.keys() & shard.keys():
            raise ValueError(f"{path} repeats the weights {min(twice)} of another file: keep one of them")
        weights |= shard
    if not weights:
        raise ValueError(
            f"{folder} holds no *.safetensors: pickled weights (.bin, .pt) can run code and are not read; convert them"
        )
    return PublicCheckpoint(folder, config, weights)


# ---- the base, as the formats describe it


@dataclass(frozen=True)
class Target:
    """What the formats say of the base."""

    name: str  # folder or hub id
    architectures: Sequence[str]  # its model class in transformers
    context_length: int
    stored_dtype: str  # name of the dtype that it is stored in


def read_target(name: str) -> Target:
    """Read a base's configuration, without its weights."""
    context_length = load_base_info(name).context_length  # its errors say what to do if there is no such base
    config = load_config(name)
    stored = str(config.dtype).removeprefix("torch.")
    dtype = stored if stored in ("bfloat16", "float16") else "float32"
    return Target(name, config.architectures or [], context_length, dtype)


def check_layers(layers: Sequence[int], base: BaseShape) -> None:
    """Raise ValueError if a drafter fuses outputs of the base that engines do not hand to it."""
    if not all(0 < layer < base.num_layers for layer in layers):
        raise ValueError(
            f"engines fuse the outputs of layers 1 to {base.num_layers - 1} of this base, not hidden_layers "
            f"{list(layers)} (-1 is the normed last state): train the drafter on such layers"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(f"engines hand each layer over once, and hidden_layers are {list(layers)}: train on others")


def by_depth(fused: Tensor, layers: Sequence[int]) -> Tensor:
    """The weight (D, F * D) that fuses layers, with its columns in the order in which vLLM hands them over."""
    order = sorted(range(len(layers)), key=layers.__getitem__)
    return fused.unflatten(1, (len(layers), -1))[:, order].flatten(1)


def speculators_config(algorithm: str, architecture: str, num_tokens: int, target: Target) -> dict[str, Any]:
    """The fields that every checkpoint of speculators has, in the form of version 0.7."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
    }
