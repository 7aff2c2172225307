"""The folder of a trained drafter: config.json (the recipe and its base) and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data.files import CHECKSUMS, atomic_write, check_files, read_json
from drafters import recipe, registry
from drafters.protocol import BaseShape, LearnedDrafter

FORMAT = 1
FILES = "config.json", "model.safetensors", CHECKSUMS, "README.md"
"""The files of an exported drafter."""
# Options that multiply the hidden size in weights; where the product is far above the weights, all shapes are compared.
SIZES = "num_layers", "num_heads", "num_frames", "markov_rank", "draft_vocab_size"
SLACK = 4
MAX_SIZE = 1 << 24  # of a dimension of the base, or of a number in the recipe


@dataclass(frozen=True)
class DrafterConfig:
    """The contents of config.json.

    Args:
        class_path: Class of the drafter, as in the YAML.
        init_args: Arguments of its constructor, without the base's shape. Flat keys of older recipes are read too.
        base: Dimensions of the base.
        base_name: Folder or hub id of the base that it was trained for.
        tokenizer_hash: Hash of the base's vocabulary.
        training: Record of the training: data, steps, measured acceptance length, command.
    """

    class_path: str
    init_args: dict[str, Any]
    base: BaseShape
    base_name: str
    tokenizer_hash: str
    training: dict[str, Any] = field(default_factory=dict)

    def nested_init_args(self) -> dict[str, Any]:
        """``init_args`` with every option in its group, also for a recipe with flat keys.

        Raises:
            ValueError: The class is not a registered drafter.
        """
        return recipe.nested(self.init_args, recipe.groups(registry.find_class(self.class_path)))

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the recipe asks for no more memory than its weights take, before a drafter is built.

        Args:
            shapes: The shape of each weight.

        Raises:
            ValueError: It asks for more layers than there are weights, or for larger ones.
        """
        numbers = {key.rpartition(".")[2]: value for key, value in recipe.flattened(self.nested_init_args()).items()}
        counts = {key: numbers[key] for key in SIZES if isinstance(numbers.get(key), int)}
        if (num_layers := counts.pop("num_layers", 0)) > len(shapes):
            raise ValueError(f"num_layers is {num_layers}, but the weights are {len(shapes)} tensors")
        base, total = self.base, sum(map(prod, shapes.values()))
        largest = max(base.hidden_size, base.intermediate_size, base.num_heads * base.head_dim, *counts.values())
        if base.hidden_size * largest <= SLACK * total:
            return
        with torch.device("meta"):  # nothing is allocated
            expected = {name: list(weight.shape) for name, weight in self.build().state_dict().items()}
        if wrong := [name for name in expected if expected[name] != list(shapes.get(name, ()))]:
            raise ValueError(f"{wrong[0]} is {list(shapes.get(wrong[0], ()))}, not {expected[wrong[0]]}")

    def build(self) -> LearnedDrafter:
        """A drafter with fresh weights.

        Raises:
            ValueError: The class is not a registered drafter, or the arguments do not fit it.
        """
        drafter_class = registry.find_class(self.class_path)
        try:
            return recipe.build(drafter_class, self.base, self.init_args)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the arguments of {self.class_path} do not fit: {error}") from error


def save(folder: Path, drafter: LearnedDrafter, config: DrafterConfig) -> None:
    """Write a drafter's folder. Each file appears complete or not at all, the weights last."""
    text = json.dumps({"format": FORMAT, **asdict(config)}, indent=2)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    with atomic_write(folder / "model.safetensors") as new, atomic_write(folder / "config.json") as new_config:
        new_config.write_text(text + "\n", encoding="utf-8")
        save_file(weights, new, metadata={"format": "pt"})


def read_config(folder: Path) -> DrafterConfig:
    """Read config.json.

    Raises:
        ValueError: The file is missing, is not a drafter's configuration, or does not have its checksum.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"no drafter at {folder}: config.json is missing; make one with `drafters export CKPT OUT`")
    try:
        values = read_json(path)
        if "format" not in values:
            raise ValueError("no format: `drafters import` reads folders of other tools, and of --format vllm")
        if values.pop("format") != FORMAT:
            raise ValueError("another format version")
        config = DrafterConfig(**values | {"base": BaseShape(**values["base"])})
        check_values(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a drafter's configuration ({error}); export the drafter again") from error
    check_files(folder, path.name)
    return config


def check_values(config: DrafterConfig) -> None:
    """Raise ValueError if a value is of a wrong type, or larger than any drafter has it."""
    for name, kind in (("init_args", dict), ("training", dict), ("base_name", str), ("tokenizer_hash", str)):
        if not isinstance(getattr(config, name), kind):
            raise ValueError(f"{name} is not {'an object' if kind is dict else 'a text'}")
    for size in fields(BaseShape):
        value = getattr(config.base, size.name)
        is_number = type(value) is int or (size.type == "float" and type(value) is float and isfinite(value))
        if not is_number or not 0 < value <= MAX_SIZE:
            raise ValueError(f"{size.name} of the base is {value!r}")
    for name, value in recipe.flattened(config.init_args).items():
        if isinstance(value, int) and abs(value) > MAX_SIZE and not name.endswith("seed"):
            raise ValueError(f"{name} is {value}")


def load(
    folder: str | Path, dtype: torch.dtype = torch.float32, config: DrafterConfig | None = None
) -> tuple[LearnedDrafter, DrafterConfig]:
    """Load a drafter for decoding. Needs neither Lightning nor the training checkpoint.

    Args:
        folder: Folder that the drafter was exported to.
        dtype: Dtype of its weights.
        config: Its configuration, if the caller has changed an option; config.json by default.

    Raises:
        ValueError: The folder is missing, its weights are damaged, or they do not fit the recipe.
    """
    folder = Path(folder)
    config = config or read_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"no drafter at {folder}: model.safetensors is missing; export the drafter again")
    check_files(folder, path.name)
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); export the drafter again") from error
    try:
        config.check_weights({name: weight.shape for name, weight in weights.items()})
    except ValueError as error:
        raise ValueError(f"{path} does not fit its config.json ({error}); export the drafter again") from error
    drafter = config.build()
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path} does not fit its config.json ({reason}); export the drafter again") from error
    return drafter.to(dtype).eval().requires_grad_(False), config
