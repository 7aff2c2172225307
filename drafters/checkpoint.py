"""The folder of a trained drafter: config.json (the recipe and its base) and model.safetensors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import CHECKSUMS, atomic_write, check_files, read_json, reading, validated
from drafters import recipe, registry
from drafters.protocol import BaseShape, LearnedDrafter

FORMAT = 1
FILES = "config.json", "model.safetensors", CHECKSUMS, "README.md"
"""The files of an exported drafter."""


@dataclass(frozen=True)
class DrafterConfig:
    """The contents of config.json."""

    class_path: str  # class of the drafter, as in the YAML
    init_args: dict[str, Any]  # arguments of its constructor, without the base's shape
    base: BaseShape
    base_name: str  # folder or hub id of the base that it was trained for
    tokenizer_hash: str  # hash of the base's vocabulary
    training: dict[str, Any] = field(default_factory=dict)  # data, steps, measured acceptance length, command

    def build(self, weights: Mapping[str, Tensor] | None = None) -> LearnedDrafter:
        """A drafter with these weights, or fresh ones; ValueError if it is not registered or something does not fit."""
        if weights is not None:
            self._check_shapes(weights)
            drafter = self.build()
            drafter.load_state_dict(weights)
            return drafter
        drafter_class = registry.find_class(self.class_path)
        try:
            return recipe.build(drafter_class, self.base, self.init_args)
        except (TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise ValueError(f"the arguments of {self.class_path} do not fit: {error}") from error

    def _check_shapes(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the weights have the shapes of the recipe's; nothing is allocated."""
        with torch.device("meta"):
            fresh = self.build().state_dict()
        expected = {name: [*weight.shape] for name, weight in fresh.items()}
        shapes = {name: [*weight.shape] for name, weight in weights.items()}
        for name in sorted(expected.keys() | shapes.keys()):
            if expected.get(name) != shapes.get(name):
                raise ValueError(f"{name} is {shapes.get(name, 'missing')}, not {expected.get(name, 'there')}")


def save(folder: Path, drafter: LearnedDrafter, config: DrafterConfig) -> None:
    """Write a drafter's folder. Each file appears complete or not at all, the weights last."""
    text = json.dumps({"format": FORMAT, **asdict(config)}, indent=2)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    with atomic_write(folder / "model.safetensors") as new, atomic_write(folder / "config.json") as new_config:
        new_config.write_text(text + "\n", encoding="utf-8")
        save_file(weights, new, metadata={"format": "pt"})


def read_config(folder: Path) -> DrafterConfig:
    """Read config.json; ValueError if it is missing, is another file, or does not have its checksum."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"no drafter at {folder}: config.json is missing; make one with `drafters export CKPT OUT`")
    remedy = "this is not a drafter's configuration: export the drafter again"
    with reading(path, remedy):
        values = read_json(path, remedy)
        if "format" not in values:
            raise ValueError("no format: `drafters import` reads folders of other tools, and of --format vllm")
        if values["format"] != FORMAT:
            raise ValueError("another format version")
        config = validated(DrafterConfig, values)
    check_files(folder, path.name)
    return config


def load(
    folder: str | Path, dtype: torch.dtype = torch.float32, config: DrafterConfig | None = None
) -> tuple[LearnedDrafter, DrafterConfig]:
    """Load a drafter for decoding. Needs neither Lightning nor the training checkpoint.

    ``config`` is its configuration if the caller has changed an option. Raises ValueError if the folder is missing, its
    weights are damaged, or they do not fit the recipe.
    """
    folder = Path(folder)
    config = config or read_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"no drafter at {folder}: model.safetensors is missing; export the drafter again")
    check_files(folder, path.name)
    with reading(path, "it is damaged or cut short, or does not fit its config.json: export the drafter again"):
        drafter = config.build(load_file(path))
    return drafter.to(dtype).eval().requires_grad_(False), config
